"""The pieces of one answer on their way to a client that called the replica itself."""

from __future__ import annotations

import asyncio

from cluster.replica.live_request import LiveRequest


class DirectOutbox:
    """Wakes the one who waits for the next piece: at once for what is urgent, else once an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_urgent = False

    def touch(self, live: LiveRequest) -> None:
        """See Outbox."""
        self._is_urgent = self._is_urgent or live.is_urgent

    def settle(self) -> None:
        """See Outbox."""
        if self._is_urgent or self._interval_s == 0:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._due.set)

    async def due(self) -> None:
        """Wait until something should be sent."""
        await self._due.wait()
        self.reset()

    def reset(self) -> None:
        """Nothing waits to be sent any more."""
        self._due.clear()
        self._is_urgent = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
