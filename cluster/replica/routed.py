"""Whether the routers that a replica announces itself to send it requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

ABSENT_AFTER_S = 2.0
"""A router that has taken no announcement for this long is away: nobody waits for it."""


class Routed:
    """Put together from two sides: which router answers at each address, and which router has had a whole answer."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._names: dict[str, str] = dict.fromkeys(addresses, "")
        """Of the routers that have taken an announcement, by address; "" = none has there."""
        self._answered: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def names(self) -> set[str]:
        """Of the routers that have taken an announcement."""
        return {name for name in self._names.values() if name}

    def announce_to(self, addresses: Sequence[str]) -> set[str]:
        """These are the addresses from now on; returns the names of routers that are at none of them, as far as is known."""
        before = self.names
        self._names = {address: self._names.get(address, "") for address in addresses}
        self._changed.set()
        return before - self.names

    def note_taken(self, address: str, router: str) -> None:
        """The router of this name has taken an announcement at the address."""
        if address in self._names:
            self._names[address] = router
            self._changed.set()

    def note_answered(self, router: str) -> None:
        """The router of this name has had a whole answer, which is the canary's at first."""
        self._answered.add(router)
        self._changed.set()

    @property
    def missing(self) -> list[str]:
        """Addresses without a router that has had an answer."""
        return [address for address, name in self._names.items() if name not in self._answered]

    async def wait(self, timeout_s: float) -> bool:
        """Wait until all routers that are there have had an answer, and one at least; False when they have not in time.

        Where no address is known, as when routers were told of the replica, any one will do.
        """
        began_s = time.monotonic()
        while True:
            self._changed.clear()
            left_s = began_s + timeout_s - time.monotonic()
            absent_s = began_s + ABSENT_AFTER_S - time.monotonic()
            if self._answered and not (self.missing if absent_s > 0 else self._present & set(self.missing)):
                return True
            if left_s <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, absent_s) if absent_s > 0 else left_s)
            except TimeoutError:
                continue

    async def wait_heard(self, timeout_s: float = ABSENT_AFTER_S) -> None:
        """Wait until a router has taken an announcement at each address, for at most that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._present != self._names.keys():
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def _present(self) -> set[str]:
        return {address for address, name in self._names.items() if name}
