"""What messages travel over between two simulated hosts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Way:
    """Whether messages pass from one host to another."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: list[Callable[[], None]] = []

    def set_open(self, is_open: bool) -> None:
        self.is_open = is_open
        waiting, self._waiting = (self._waiting, []) if is_open else ([], self._waiting)
        for go_on in waiting:
            go_on()

    def when_open(self, go_on: Callable[[], None]) -> None:
        if self.is_open:
            go_on()
        else:
            self._waiting.append(go_on)

    async def wait(self) -> None:
        opened = asyncio.Event()
        self.when_open(opened.set)
        await opened.wait()


class Pipe:
    """One direction of a call."""

    def __init__(self, way: Way, latency_s: float) -> None:
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._way = way
        self._latency_s = latency_s
        self._sent: deque[Any] = deque()
        self._num_due = 0
        self._is_closed = False

    def send(self, item: Any) -> None:
        """A copy of a message arrives; what is no message arrives as it is."""
        if hasattr(item, "SerializeToString"):
            item = type(item).FromString(item.SerializeToString())
        self._sent.append(item)
        asyncio.get_running_loop().call_later(self._latency_s, self._arrive)

    def close(self) -> None:
        """Nothing arrives any more."""
        self._is_closed = True
        self._sent.clear()

    def _arrive(self) -> None:
        self._num_due += 1
        self._way.when_open(self._deliver)

    def _deliver(self) -> None:
        while self._num_due and self._sent and self._way.is_open and not self._is_closed:
            self._num_due -= 1
            self.arrived.put_nowait(self._sent.popleft())
