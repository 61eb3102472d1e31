"""The way of an engine's events from its thread to the host's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from worker.request import EngineEvent

Receiver = Callable[[Sequence[EngineEvent]], None]


class EventFanout:
    """An EventSink: the engine's thread calls it, and the receiver gets the events on the event loop, in order.

    A step costs one wake-up of the loop; steps that end while the loop is busy cost none and are taken together.
    """

    def __init__(self) -> None:
        self._batches: deque[Sequence[EngineEvent]] = deque()
        self._is_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver: Receiver | None = None

    def connect(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        """Deliver from now on; events that came earlier are delivered too."""
        self._loop, self._receiver = loop, receiver
        if self._batches:
            self._schedule()

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        """Take what a step brought; on any thread, without waiting."""
        self._batches.append(events)
        if not self._is_scheduled and self._loop is not None:
            self._schedule()

    def _schedule(self) -> None:
        assert self._loop is not None
        self._is_scheduled = True
        # The loop may be closed already when an engine ends after its host did.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: whatever is appended from here on schedules another delivery.
        self._is_scheduled = False
        assert self._receiver is not None
        for _ in range(len(self._batches)):
            self._receiver(self._batches.popleft())
