"""Which suspect is being tried on which replica."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from cluster.router.link import Link
from cluster.router.stream import LinkStream

PATIENCE_S = 0.25
"""How long the last of several suspects should wait for its trial."""
STEPS_PER_TRIAL = 3
"""The one under way, and those of a short trial."""
TRIAL_OVERHEAD_S = 0.005
"""What a trial takes beside its steps."""


class Trials:
    """At most one at a time on each replica, so that its death tells which request brought it about.

    Whatever else a replica has stands still meanwhile: suspects are tried on half of them at most, and on more only when
    there are so many that they would have to wait for long.
    """

    def __init__(
        self, on_change: Callable[[], None], num_replicas: Callable[[], int], step_s: Callable[[], float]
    ) -> None:
        self._on_change = on_change
        self._num_replicas = num_replicas
        self._step_s = step_s
        self._holders: dict[Link, LinkStream] = {}
        self._num_waiting = 0

    @property
    def num_places(self) -> int:
        """Replicas where suspects may be tried at the same time."""
        num_replicas = self._num_replicas()
        trial_s = STEPS_PER_TRIAL * self._step_s() + TRIAL_OVERHEAD_S
        num_needed = math.ceil((self._num_waiting + len(self._holders)) * trial_s / PATIENCE_S)
        return max(1, num_replicas // 2, min(num_needed, num_replicas))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A suspect waits for its trial."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def may_begin(self, link: Link) -> bool:
        """Whether nothing is being tried there, and not on too many others."""
        return link not in self._holders and len(self._holders) < self.num_places

    def is_under_way(self, link: Link) -> bool:
        """Whether something is being tried there."""
        return link in self._holders

    def begin(self, link: Link, stream: LinkStream) -> None:
        """`stream` is tried on `link` until it ends, or has passed."""
        self._holders[link] = stream

    def end(self, link: Link, stream: LinkStream) -> None:
        """The next suspect may be tried there; a stream that is not on trial changes nothing."""
        if self._holders.get(link) is stream:
            del self._holders[link]
            self._on_change()
