"""The memory that graphs live in: one pool per worker, or one per graph, with a cap and an account."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from worker.graphs.backend import CaptureBackend, MemoryReading, PoolHandle, RecordedGraph
from worker.graphs.captured import CaptureCost
from worker.graphs.errors import CaptureOutOfMemory
from worker.graphs.key import GraphKey
from worker.graphs.lease import OutputEpoch


@dataclass(frozen=True, slots=True)
class PooledGraph:
    """A recorded graph, the epoch its outputs live in, and what it cost."""

    recorded: RecordedGraph
    epoch: OutputEpoch
    cost: CaptureCost


class GraphPool:
    """Captures into shared memory (`use_pool`) or into memory of each graph's own, up to `max_bytes` in all.

    Graphs of a shared pool overwrite each other's outputs at every replay: they share one OutputEpoch.
    """

    def __init__(self, backend: CaptureBackend, *, use_pool: bool = True, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        self.backend = backend
        self.max_bytes = max_bytes
        self._use_pool = use_pool
        self._handle: PoolHandle | None = None
        self._epoch = OutputEpoch(backend)
        self._graphs: dict[GraphKey, PooledGraph] = {}
        self._bytes: dict[GraphKey, int] = {}

    @property
    def used_bytes(self) -> int:
        """Device memory that all captures have taken and not given back."""
        return sum(self._bytes.values())

    @property
    def is_over_cap(self) -> bool:
        """Whether memory of a released graph is stuck in the pool, over the cap, because other graphs hold the pool."""
        return self.max_bytes is not None and self.used_bytes > self.max_bytes

    @property
    def bytes_by_key(self) -> Mapping[GraphKey, int]:
        """Memory each capture has taken; with a shared pool, the first large graph pays for the later small ones."""
        return MappingProxyType(self._bytes)

    def capture(
        self,
        key: GraphKey,
        run: Callable[[], Any],
        *,
        generators: Sequence[torch.Generator] = (),
        outside: Collection[int] = (),
        keep_outputs: bool = False,
    ) -> PooledGraph:
        """Record `run`. Raises CaptureOutOfMemory if that takes the pool over its cap; the graph is then gone again."""
        if key in self._graphs:
            raise ValueError(f"{key} is in the pool already")
        handle = self._pool_for_next()
        before, started = self.backend.memory(), time.perf_counter()
        try:
            recorded = self.backend.capture(
                run, pool=handle, generators=generators, outside=outside, keep_outputs=keep_outputs
            )
        except BaseException:
            self._after_failure(handle, generators)
            raise
        cost = _cost(before, self.backend.memory(), time.perf_counter() - started, recorded)
        pooled = PooledGraph(recorded, self._epoch if self._use_pool else OutputEpoch(self.backend), cost)
        self._graphs[key] = pooled
        self._bytes[key] = cost.num_bytes
        self._enforce_cap(key)
        return pooled

    def release(self, key: GraphKey) -> None:
        """Destroy a graph. What it alone used becomes free; memory shared with other graphs stays in the pool."""
        pooled = self._graphs.pop(key, None)
        if pooled is None:
            return
        pooled.recorded.reset()
        taken = self._bytes.pop(key)
        if not self._use_pool:
            return
        if not self._graphs:
            self._handle = None  # torch does not accept a handle again whose graphs are all gone
            return
        heir = next(iter(self._graphs))
        self._bytes[heir] += min(taken, pooled.cost.pool_bytes)

    def close(self) -> None:
        """Destroy every graph and return the memory to the device."""
        for key in tuple(self._graphs):
            self.release(key)
        self.backend.trim()

    def _pool_for_next(self) -> PoolHandle:
        if not self._use_pool:
            return self.backend.new_pool()
        if self._handle is None:
            self._handle = self.backend.new_pool()
        return self._handle

    def _after_failure(self, handle: PoolHandle, generators: Sequence[torch.Generator]) -> None:
        """Leave a handle behind that a failed capture has spoilt, or that no graph holds any more."""
        is_held = self._use_pool and bool(
            self._graphs
        )  # torch does not accept a handle again whose graphs are all gone
        if not self.backend.is_usable(handle if is_held else self.backend.new_pool(), generators) or not is_held:
            self._handle = None

    def _enforce_cap(self, key: GraphKey) -> None:
        if not self.is_over_cap:
            return
        used = self.used_bytes
        self.release(key)
        self.backend.trim()
        raise CaptureOutOfMemory(f"the pool would hold {used} bytes and its cap is {self.max_bytes}", key=str(key))


def _cost(before: MemoryReading, after: MemoryReading, seconds: float, recorded: RecordedGraph) -> CaptureCost:
    pool_bytes = max(0, after.reserved_bytes - before.reserved_bytes)
    return CaptureCost(
        num_bytes=max(pool_bytes, before.free_bytes - after.free_bytes),
        pool_bytes=pool_bytes,
        capture_s=seconds,
        instantiate_s=recorded.instantiate_s,
        num_nodes=recorded.num_nodes,
    )
