"""A set whose entries end by themselves."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class ExpiringSet:
    """At most `max_entries`, the newest ones, each until its own time is over."""

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, entry: bytes) -> bool:
        until_s = self._until_s.get(entry)
        if until_s is None:
            return False
        if self._clock() < until_s:
            return True
        del self._until_s[entry]
        return False

    def add(self, entry: bytes, ttl_s: float) -> None:
        """Hold it for so long from now on; one that is there already begins anew."""
        self._until_s[entry] = self._clock() + ttl_s
        self._until_s.move_to_end(entry)
        if len(self._until_s) > self._max_entries:
            self._until_s.popitem(last=False)

    def left(self) -> dict[bytes, float]:
        """Every entry, oldest first, and how many seconds it has left."""
        now_s = self._clock()
        return {entry: until_s - now_s for entry, until_s in self._until_s.items() if until_s > now_s}
