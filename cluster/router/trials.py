"""Which suspect is being tried on which replica."""

from __future__ import annotations

from collections.abc import Callable

from cluster.router.link import Link
from cluster.router.stream import LinkStream


class Trials:
    """At most one at a time on each replica, so that its death tells which request brought it about."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._holders: dict[Link, LinkStream] = {}

    def may_begin(self, link: Link) -> bool:
        """Whether nothing is being tried there."""
        return link not in self._holders

    def begin(self, link: Link, stream: LinkStream) -> None:
        """`stream` is tried on `link` until it ends, or has passed."""
        self._holders[link] = stream

    def end(self, link: Link, stream: LinkStream) -> None:
        """The next suspect may be tried there; a stream that is not on trial changes nothing."""
        if self._holders.get(link) is stream:
            del self._holders[link]
            self._on_change()
