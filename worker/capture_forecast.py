"""Which graphs will fit in a given memory: the real capture session, over a backend that only counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.caching_allocator import GRANULE, CachingPool, round_up
from worker.graph_memory import EXECUTABLE_BYTES, StepMemory
from worker.graphs.backend import MemoryReading
from worker.graphs.dispatcher import Dispatcher
from worker.graphs.key import GraphKey
from worker.graphs.plan import plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.region import CaptureRegion
from worker.graphs.session import CaptureSession, SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLine:
    """What is expected of one key."""

    key: GraphKey
    order: int | None
    """Place in the order of capture, from 1; None if it is not planned at all."""
    alone_bytes: int
    """In a pool of its own, without the executable."""
    added_bytes: int
    """What the shared pool grows by when it is captured, executable included; 0 if it does not fit."""
    fits: bool
    reason: str = ""
    """Why it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureForecast:
    """The keys in their order of capture."""

    lines: tuple[GraphLine, ...]
    pool_bytes: int
    """Of all graphs that fit, without their executables."""
    executable_bytes: int

    @property
    def total_bytes(self) -> int:
        """Device memory of all graphs that fit."""
        return self.pool_bytes + self.executable_bytes


def forecast_captures(
    keys: Sequence[GraphKey],
    memory: StepMemory,
    *,
    free_bytes: int,
    use_pool: bool = True,
    max_bytes: int | None = None,
) -> CaptureForecast:
    """Go through the captures of `keys` as a worker would that has `free_bytes` left on its device."""
    backend = CountingCapture(memory, free_bytes)
    pool, dispatcher = GraphPool(backend, use_pool=use_pool, max_bytes=max_bytes), Dispatcher()
    plan = plan_captures(keys, size_of=memory.graph_bytes)
    session = CaptureSession(
        plan,
        lambda key: CaptureRegion(run=lambda: key),
        pool=pool,
        dispatcher=dispatcher,
        options=SessionOptions(precheck="never"),
        size_of=memory.graph_bytes,
    )
    while session.capture_next() is not None:
        pass
    order = {key: number for number, key in enumerate(plan.keys, 1)}
    lines = tuple(
        GraphLine(
            key=key,
            order=order.get(key),
            alone_bytes=memory.graph_bytes(key),
            added_bytes=pool.bytes_by_key.get(key, 0),
            fits=key in session.graphs,
            reason=dispatcher.dropped.get(key, ""),
        )
        for key in (*plan.keys, *(dropped.key for dropped in plan.dropped))
    )
    executables = len(session.graphs) * EXECUTABLE_BYTES
    return CaptureForecast(lines=lines, pool_bytes=backend.memory().reserved_bytes, executable_bytes=executables)


class CountingCapture:
    """A CaptureBackend on which nothing runs: regions return their key, and `memory` says what that key allocates."""

    def __init__(self, memory: StepMemory, capacity_bytes: int) -> None:
        self.device = torch.device("cpu")
        self._step = memory
        self._capacity_bytes = capacity_bytes
        self._pools: list[_CountedPool] = []

    def new_pool(self) -> _CountedPool:
        """See CaptureBackend."""
        self._pools.append(_CountedPool())
        return self._pools[-1]

    def warm_up(self, run: Callable[[], Any], num_steps: int) -> None:  # noqa: ARG002 - one step is as large as ten
        """An eager run: its memory comes from outside the pools and goes back."""
        self._allocating(run(), CachingPool(self.memory().free_bytes))

    def capture(
        self,
        run: Callable[[], Any],
        *,
        pool: _CountedPool,
        generators: Sequence[torch.Generator] = (),  # noqa: ARG002
        outside: Collection[int] = (),  # noqa: ARG002
        keep_outputs: bool = False,  # noqa: ARG002
    ) -> CountedGraph:
        """See CaptureBackend."""
        free = self.memory().free_bytes - EXECUTABLE_BYTES
        if free < 0:
            raise torch.OutOfMemoryError(f"{EXECUTABLE_BYTES} bytes are needed for one more executable")
        pool.memory.limit_bytes = pool.memory.reserved_bytes + free
        self._allocating(run(), pool.memory)
        return CountedGraph(pool)

    def is_usable(self, pool: _CountedPool, generators: Sequence[torch.Generator] = ()) -> bool:  # noqa: ARG002
        """See CaptureBackend."""
        return True

    def memory(self) -> MemoryReading:
        """What would be left of the capacity; executables come in whole granules."""
        reserved = sum(pool.memory.reserved_bytes for pool in self._pools)
        executables = round_up(sum(pool.num_graphs for pool in self._pools) * EXECUTABLE_BYTES, GRANULE)
        return MemoryReading(free_bytes=self._capacity_bytes - reserved - executables, reserved_bytes=reserved)

    def trim(self) -> None:
        """See CaptureBackend: a pool is given back with its last graph."""

    def current_stream(self) -> Hashable:
        """See CaptureBackend."""
        return None

    def wait_for(self, stream: Hashable) -> None:
        """See CaptureBackend."""

    def _allocating(self, key: GraphKey, pool: CachingPool) -> None:
        try:
            self._step.walk(key, pool)
        except MemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error


class _CountedPool:
    """Graph memory, and how many graphs hold on to it."""

    def __init__(self) -> None:
        self.memory = CachingPool()
        self.num_graphs = 0


class CountedGraph:
    """One captured key. Cannot be replayed: there is nothing to run."""

    def __init__(self, pool: _CountedPool) -> None:
        self.outputs: Any = ()
        self.instantiate_s = 0.0
        self.num_nodes: int | None = None
        self._pool: _CountedPool | None = pool
        pool.num_graphs += 1

    def replay(self) -> None:
        """See RecordedGraph; never called, as the session has no self-check."""
        raise RuntimeError("a counted graph has nothing to replay")

    def reset(self) -> None:
        """See RecordedGraph."""
        if self._pool is not None:
            self._pool.num_graphs -= 1
            if not self._pool.num_graphs:
                self._pool.memory = CachingPool()
        self._pool = None
