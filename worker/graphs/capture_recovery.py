"""Gives back what a failed capture holds: its pool in torch's allocators, its random generators, its stream."""

from __future__ import annotations

import contextlib
import ctypes
import warnings

import torch

from worker.graphs.backend import PoolHandle

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: refuses nothing to anyone."""

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs that torch's host allocator still points at, because nothing could end their capture for it: never freed."""


def end_capture(graph: torch.cuda.CUDAGraph, pool: PoolHandle, stream: torch.cuda.Stream) -> None:
    """End and forget a capture that has begun on `stream` and failed since, whoever has already tried to end it.

    Torch up to 2.13 tells its allocators and generators that a capture is over only once CUDA has ended it well, which
    CUDA never does for one that it has invalidated. So an empty capture takes its place, and torch ends that one.
    """
    with torch.cuda.stream(stream):
        _try_to_end(graph)
        if not _has_ended(graph) and _begin_empty(stream):
            _try_to_end(graph)
            _discard(stream)
    give_back(graph, pool, stream.device_index)


def give_back(graph: torch.cuda.CUDAGraph, pool: PoolHandle, device_index: int) -> None:
    """Forget a graph whose capture is not running, and take its allocations out of the pool's routing if torch has not.

    A pool counts its users, and one count too few breaks every later `empty_cache`. So the pool is released here only if
    it was still being recorded to, for then `reset` has not released it.
    """
    with contextlib.suppress(RuntimeError):
        graph.reset()
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)  # raises unless the pool is being recorded to
        _ABANDONED.append(graph)
        torch._C._cuda_releasePool(device_index, pool)


def _try_to_end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # torch warns of an empty graph
        graph.capture_end()


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether torch has ended the capture, and `reset` will release its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _begin_empty(stream: torch.cuda.Stream) -> bool:
    """Make the stream capture, unknown to torch. False where the driver refuses."""
    driver = _driver()
    return driver is not None and driver.cuStreamBeginCapture_v2(_handle(stream), ctypes.c_int(_RELAXED)) == 0


def _discard(stream: torch.cuda.Stream) -> None:
    """End a capture that torch has left running on the stream, if it has."""
    driver, status, graph = _driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuStreamIsCapturing(_handle(stream), ctypes.byref(status)) != 0 or not status.value:
        return
    if driver.cuStreamEndCapture(_handle(stream), ctypes.byref(graph)) == 0 and graph:
        driver.cuGraphDestroy(graph)


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _handle(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
