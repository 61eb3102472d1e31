"""How torch keeps count of captures: its graphs, its two allocators, CUDA's verdict on a capture. No GPU, no memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

REFUSED = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Search for `cudaErrorStreamCaptureUnsupported' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, "
    "so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)

Pool = tuple[int, int]


def accelerator_error(message: str, code: int) -> torch.AcceleratorError:
    """An error of CUDA as torch raises it."""
    error = torch.AcceleratorError(message)
    error.error_code = code  # type: ignore[attr-defined]
    return error


class Allocator:
    """Pools by their number of users. A pool without users is dead; one released too often breaks `empty_cache`."""

    def __init__(self) -> None:
        self.users: dict[Pool, int] = {}
        self.recording: list[Pool] = []

    def begin(self, pool: Pool) -> None:
        if self.users.get(pool, 1) <= 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.append(pool)

    def end(self, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, pool: Pool) -> None:
        self.users[pool] -= 1
        if self.users[pool] < 0:
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED")

    def empty_cache(self) -> None:
        if any(users < 0 for users in self.users.values()):
            raise RuntimeError("it->second->use_count == 0 INTERNAL ASSERT FAILED")


@dataclass
class TorchState:
    """One process. `ends_after_error` is torch from 2.14 on: `capture_end` tells the allocators whatever CUDA says."""

    ends_after_error: bool = False
    device: Allocator = field(default_factory=Allocator)
    host: Allocator = field(default_factory=Allocator)
    is_capturing: bool = False
    is_invalidated: bool = False
    generator_is_captured: bool = False

    def begin_on_stream(self) -> None:
        assert not self.is_capturing, "the stream already captures"
        self.is_capturing, self.is_invalidated = True, False

    def invalidate(self) -> None:
        """A refused call."""
        self.is_invalidated = True
        raise accelerator_error(REFUSED, 900)

    def end_on_stream(self) -> None:
        """As cudaStreamEndCapture: an invalidated capture ends too, with an error."""
        if not self.is_capturing:
            raise accelerator_error("CUDA error: the operation cannot be performed in the present state", 401)
        self.is_capturing = False
        if self.is_invalidated:
            raise accelerator_error("CUDA error: operation failed due to a previous error during capture", 901)

    def empty_cache(self) -> None:
        self.device.empty_cache()
        self.host.empty_cache()


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, state: TorchState) -> None:
        self.state = state
        self.pool_id: Any = None
        self.has_begun = self.has_acquired = self.has_ended = False

    def register_generator_state(self, _: torch.Generator) -> None: ...

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        self.pool_id = pool
        self.state.device.begin(pool)
        self.state.host.begin(pool)
        self.has_acquired = True
        self.state.begin_on_stream()
        self.state.generator_is_captured = self.has_begun = True

    def capture_end(self) -> None:
        if self.state.ends_after_error:
            self._check_begun()
            try:
                self.state.end_on_stream()
            finally:
                self._end_for_allocators()
        else:
            self.state.end_on_stream()
            self._check_begun()
            self._end_for_allocators()
        self.state.generator_is_captured = False
        self.has_ended = True

    def pool(self) -> Pool:
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        pool: Pool = self.pool_id
        return pool

    def reset(self) -> None:
        if self.has_acquired if self.state.ends_after_error else self.has_ended:
            self.state.device.release(self.pool_id)
            self.state.host.release(self.pool_id)
        if self.state.ends_after_error:
            self.state.generator_is_captured = False
        self.has_begun = self.has_acquired = self.has_ended = False

    def replay(self) -> None:
        assert self.has_ended

    def _check_begun(self) -> None:
        if not self.has_begun:
            raise RuntimeError("capture_end() called before capture_begin().")

    def _end_for_allocators(self) -> None:
        self.has_begun = False
        self.state.device.end(self.pool_id)
        self.state.host.end(self.pool_id)
