"""In which order kernels are built: what a first request launches before anything runs, the rest between steps."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import partial

from worker.graph_regions import FRESH, GraphRegions
from worker.graphs.key import GraphKey
from worker.kernels.build_ahead import MAX_THREADS, build_ahead
from worker.model.shortened import shortened

GROUP = 4
"""Keys of one piece: so few that rows that run do not wait for long."""
THREADS = 3
"""That build a piece: more would not be faster, and keep the thread that sends answers from running."""


class KernelBuilds:
    """The keys whose kernels are not built yet."""

    def __init__(self, regions: GraphRegions, keys: Iterable[GraphKey]) -> None:
        self._regions = copy.copy(regions)
        self._regions.model = shortened(regions.model)
        self._waiting = deque(keys)

    @property
    def num_left(self) -> int:
        """Pieces that `build_next` will build."""
        return -(-len(self._waiting) // GROUP)

    def build_first(self) -> int:
        """Build what the first request launches: the smallest decode step and the shortest prompt. How many kernels."""
        first = [key for key in (_smallest(self._waiting, "decode"), _smallest(self._waiting, "prefill")) if key]
        for key in first:
            self._waiting.remove(key)
        return self._build(first)

    def build_next(self) -> int | None:
        """Build one more piece, in the order given; how many kernels. None when nothing is left."""
        if not self._waiting:
            return None
        return self._build([self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))], THREADS)

    def _build(self, keys: Iterable[GraphKey], max_threads: int = MAX_THREADS) -> int:
        return build_ahead((partial(self._regions.go_through, key) for key in keys), max_threads=max_threads)


def _smallest(keys: Iterable[GraphKey], phase: str) -> GraphKey | None:
    found = [key for key in keys if key.phase == phase and (phase == "decode" or key.variant == FRESH)]
    return min(found, key=lambda key: (key.bucket, key.tier), default=None)
