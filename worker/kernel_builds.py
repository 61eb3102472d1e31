"""In which order kernels are built: what a first request launches before anything runs, the rest between steps."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from worker.graph_regions import FRESH, GraphRegions
from worker.graphs.key import GraphKey
from worker.kernels.build_ahead import KernelsAhead
from worker.kernels.build_processes import BuildProcesses
from worker.model.shortened import shortened

GROUP = 4
"""Keys of one piece: so few that rows that run do not wait for long."""
WAIT_S = 0.05
"""How long a piece waits for kernels that other processes build."""


class KernelBuilds:
    """The keys whose kernels are not built yet.

    In `processes`, kernels of all keys are asked for at once, a piece of keys at a time, and those of a key are waited for
    when it is captured. Without, each piece waits for its own: building holds the interpreter's lock, and would slow
    whatever runs beside it.
    """

    def __init__(
        self, regions: GraphRegions, keys: Iterable[GraphKey], processes: BuildProcesses | None = None
    ) -> None:
        self._regions = copy.copy(regions)
        self._regions.model = shortened(regions.model)
        self._waiting = deque(keys)
        self._processes = processes
        self._ahead = KernelsAhead(processes)
        self._kernels: dict[GraphKey, list[Any]] = {}

    @property
    def num_left(self) -> int:
        """Pieces that `build_next` will build."""
        return -(-len(self._waiting) // GROUP)

    def build_first(self) -> int:
        """Build what the first request launches: the smallest decode step and the shortest prompt. How many kernels."""
        first = [key for key in (_smallest(self._waiting, "decode"), _smallest(self._waiting, "prefill")) if key]
        for key in first:
            self._waiting.remove(key)
        asked = self._ask(first)
        self._ahead.settle()
        return asked

    def build_next(self) -> int | None:
        """Build one more piece, in the order given; how many kernels. None when nothing is left to ask for."""
        if not self._waiting:
            return None
        asked = self._ask([self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))])
        if self._processes is None:
            self._ahead.settle()
        return asked

    def are_built(self, key: GraphKey) -> bool:
        """Whether the kernels of `key`, which was asked for, are; waits for them a little.

        Sampling is tried out as a whole before its first key, so that one waits for all.
        """
        kernels = None if key.phase == "sample" else self._kernels.get(key, ())
        is_built = self._ahead.settle(kernels, wait_s=WAIT_S)
        if not self._ahead.num_pending and not self._waiting and self._processes is not None:
            self._processes.close()
        return is_built

    def _ask(self, keys: Iterable[GraphKey]) -> int:
        """How many kernels were not asked for before."""
        before = self._ahead.num_asked
        for key in keys:
            self._kernels[key] = self._ahead.go_through(partial(self._regions.go_through, key))
        return self._ahead.num_asked - before


def _smallest(keys: Iterable[GraphKey], phase: str) -> GraphKey | None:
    found = [key for key in keys if key.phase == phase and (phase == "decode" or key.variant == FRESH)]
    return min(found, key=lambda key: (key.bucket, key.tier), default=None)
