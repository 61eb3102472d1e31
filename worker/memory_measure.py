"""What a worker really takes: it is built and its graphs are captured, and every part is read off the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from worker.build import create_engine
from worker.config import WorkerConfig
from worker.graph_runner import GraphRunner
from worker.graphs.backend import MemoryReading, backend_for
from worker.graphs.key import GraphKey
from worker.load_causal_lm import load_causal_lm
from worker.memory_plan import weights_bytes
from worker.model.progress import Progress
from worker.model.source import resolve_model
from worker.shapes import choose_device, choose_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKey:
    """One captured graph."""

    added_bytes: int
    """What device memory shrank by, executable included."""
    pool_bytes: int
    """The part of it that the graph pool grew by."""
    instantiate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The memory of one worker on its device, in bytes."""

    gpu_bytes: int
    context_bytes: int
    """In use before the worker came: CUDA's context, and whatever else is on the device."""
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    inputs_bytes: int
    graphs: Mapping[GraphKey, MeasuredKey]
    dropped: Mapping[GraphKey, str]
    """Keys without a graph, with the reason."""
    graph_bytes: int
    """Of all graphs, as the sum of what each capture took."""
    graph_device_bytes: int
    """Of all graphs, as free device memory before the first capture and after the last tells it."""
    capture_s: float
    used_bytes: int
    """Of the device in the end."""


def measure_memory(config: WorkerConfig, *, progress: Progress | None = None) -> MeasuredMemory:
    """Build the worker, capture everything, take readings, and let go of it all.

    Raises ModelLoadError, or ValueError for a configuration that cannot work.
    """
    device = choose_device(config)
    backend = backend_for(device)
    gpu_bytes, context = _device_bytes(device)
    files = resolve_model(config.model, load_format=config.load_format, cache_dir=config.cache_dir, progress=progress)
    dtype = choose_dtype(config, device.type)
    before = _allocated(device)
    served = load_causal_lm(config, files, device=device, dtype=dtype, progress=progress)
    weights = _allocated(device) - before or weights_bytes(served.model.module)
    engine = create_engine(config, files, served, None)
    kv = engine.kv_cache.storage.nbytes
    inputs = max(_allocated(device) - before - weights - kv, 0)
    backend.trim()
    start, started_s = _reading(backend.memory()), time.perf_counter()
    while engine.prepare_next():
        pass
    capture_s = time.perf_counter() - started_s
    runner = engine.runner
    backend.trim()
    measured = MeasuredMemory(
        gpu_bytes=gpu_bytes,
        context_bytes=context,
        weights_bytes=weights,
        kv_bytes=kv,
        num_blocks=engine.kv_cache.num_blocks,
        inputs_bytes=inputs,
        graphs=_measured_keys(runner) if isinstance(runner, GraphRunner) else {},
        dropped=_lost_keys(runner) if isinstance(runner, GraphRunner) else {},
        graph_bytes=runner.session.recorder.pool.used_bytes if isinstance(runner, GraphRunner) else 0,
        graph_device_bytes=max(start - _reading(backend.memory()), 0),
        capture_s=capture_s,
        used_bytes=_device_bytes(device)[1],
    )
    if isinstance(runner, GraphRunner):
        runner.session.close()
    return measured


def _measured_keys(runner: GraphRunner) -> dict[GraphKey, MeasuredKey]:
    added = runner.session.recorder.pool.bytes_by_key
    return {
        key: MeasuredKey(
            added_bytes=added.get(key, 0), pool_bytes=graph.cost.pool_bytes, instantiate_s=graph.cost.instantiate_s
        )
        for key, graph in runner.session.graphs.items()
    }


def _lost_keys(runner: GraphRunner) -> dict[GraphKey, str]:
    return {**runner.dispatcher.dropped, **runner.dispatcher.quarantined}


def _device_bytes(device: torch.device) -> tuple[int, int]:
    """(total, in use)."""
    if device.type != "cuda":
        return 0, 0
    torch.zeros(1, device=device)  # makes the context
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reading(memory: MemoryReading) -> int:
    return memory.free_bytes
