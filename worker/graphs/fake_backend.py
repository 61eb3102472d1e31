"""CUDA graphs without CUDA: the same keys, buffers, padding, dispatch and traps, on the CPU and in continuous integration."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from worker.graphs.backend import MemoryReading
from worker.graphs.region import storage_of
from worker.graphs.tape import Tape, record


class FakePool:
    """Stands for a pool of graph memory: as large as its largest graph ever was, until its last graph is gone."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.nbytes = 0

    def add(self, graph: FakeGraph) -> None:
        """A graph was captured into the pool."""
        self.graphs.append(graph)
        self.nbytes = max(self.nbytes, graph.nbytes)

    def remove(self, graph: FakeGraph) -> None:
        """A graph left the pool."""
        self.graphs.remove(graph)
        if not self.graphs:
            self.nbytes = 0


class FakeCapture:
    """Records the torch operators of a region and replays them into the same tensors.

    As with a real graph, Python runs once: branches, numbers, shapes and addresses are frozen; capture itself changes no
    memory; outputs mean nothing before the first replay; a wait of the host or an unregistered generator is refused.
    When `strict`, a replay overwrites with NaN what the shared pool of a GPU might overwrite: the outputs of the pool's
    other graphs. `capacity_bytes` makes captures run out of memory.

    Only work that passes through torch's operators is recorded: a kernel launched behind torch's back runs at capture and
    never again.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, strict: bool = True, capacity_bytes: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self._strict = strict
        self._capacity_bytes = capacity_bytes
        self._pools: list[FakePool] = []

    def new_pool(self) -> FakePool:
        """A new, empty pool."""
        self._pools.append(FakePool())
        return self._pools[-1]

    def warm_up(self, run: Callable[[], Any], num_steps: int) -> None:
        """Run the region `num_steps` times."""
        for _ in range(num_steps):
            run()

    def capture(
        self,
        run: Callable[[], Any],
        *,
        pool: FakePool,
        generators: Sequence[torch.Generator] = (),
        outside: Collection[int] = (),  # noqa: ARG002 - nothing here can lose its memory
        keep_outputs: bool = False,
    ) -> FakeGraph:
        """Record the region; raises RuntimeError where CUDA would, OutOfMemoryError over the capacity."""
        outputs, tape = record(run, generators)
        started = time.perf_counter()
        graph = FakeGraph(outputs, tape, pool, strict=self._strict, keeps_outputs=keep_outputs)
        before = pool.nbytes
        pool.add(graph)
        if self._capacity_bytes is not None and self._used_bytes() > self._capacity_bytes:
            graph.reset()
            pool.nbytes = before
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tape.nbytes} bytes (emulated).")
        if self._strict:
            tape.poison()
        graph.instantiate_s = time.perf_counter() - started
        return graph

    def is_usable(self, pool: FakePool, generators: Sequence[torch.Generator] = ()) -> bool:  # noqa: ARG002
        """Always: an emulated capture that fails leaves nothing behind."""
        return True

    def memory(self) -> MemoryReading:
        """Emulated: what all pools hold."""
        capacity = 1 << 62 if self._capacity_bytes is None else self._capacity_bytes
        return MemoryReading(free_bytes=capacity - self._used_bytes(), reserved_bytes=self._used_bytes())

    def trim(self) -> None:
        """Nothing is cached here."""

    def current_stream(self) -> Hashable:
        """There are no streams."""
        return None

    def wait_for(self, stream: Hashable) -> None:
        """Everything has happened already."""

    def _used_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)


class FakeGraph:
    """One recorded graph of a FakePool."""

    def __init__(self, outputs: Any, tape: Tape, pool: FakePool, *, strict: bool, keeps_outputs: bool) -> None:
        self.outputs = outputs
        self.instantiate_s = 0.0
        self.num_nodes: int | None = len(tape.operations)
        self.nbytes = tape.nbytes
        self._tape = tape
        self._pool = pool
        self._strict = strict
        self._keeps_outputs = keeps_outputs
        self._output_storages = {storage_of(leaf) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)}

    def replay(self) -> None:
        """Run the recorded operators again."""
        if self._strict:
            self._overwrite_others()
        self._tape.replay()

    def reset(self) -> None:
        """Leave the pool."""
        if self in self._pool.graphs:
            self._pool.remove(self)
        self._tape = Tape()
        self.outputs = None

    def _overwrite_others(self) -> None:
        """Kept outputs are safe from graphs captured after them; from those before them they are not."""
        mine = self._pool.graphs.index(self)
        for index, graph in enumerate(self._pool.graphs):
            if graph is not self and (index > mine or not graph._keeps_outputs):
                graph._tape.poison(graph._output_storages)
