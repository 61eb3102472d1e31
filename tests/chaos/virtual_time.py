"""An event loop on which waiting takes no time: hours of timeouts pass in seconds, in the same order every time."""

from __future__ import annotations

import asyncio
import gc
import inspect
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

START_S = 1000.0
EPOCH_NS = 1_700_000_000 * 10**9

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everybody waits, and nothing will ever happen."""


class _VirtualSelector(selectors.DefaultSelector):
    """Reports what is ready; instead of waiting for more, moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("no task can run and no timer is set")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time` moves when all tasks wait."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtual(create: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end with every clock of this process on the loop's time."""
    loop = VirtualLoop()
    try:
        with _clocks_of(loop):
            asyncio.set_event_loop(loop)
            main = loop.create_task(_and_cancel_the_rest(create()))
            try:
                return loop.run_until_complete(main)
            finally:
                main.cancel()
                loop.run_until_complete(asyncio.gather(main, return_exceptions=True))
                loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        # Here, and not in the middle of whatever comes next: what is left of a run are half-run coroutines.
        gc.collect()


async def _and_cancel_the_rest(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@contextmanager
def _clocks_of(loop: VirtualLoop) -> Iterator[None]:
    real, real_ns = time.monotonic, time.time_ns
    names = list(_defaults(real))
    time.monotonic = loop.time
    time.time_ns = lambda: EPOCH_NS + round(loop.time() * 1e9)
    for defaults, name in names:
        defaults[name] = loop.time
    try:
        yield
    finally:
        time.monotonic, time.time_ns = real, real_ns
        for defaults, name in names:
            defaults[name] = real


def _defaults(clock: Callable[[], float]) -> Iterator[tuple[dict[str, Any], str]]:
    """Keyword arguments of our own classes whose default is this clock."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("cluster", "tests"):
            continue
        for _, kind in inspect.getmembers(module, inspect.isclass):
            defaults = getattr(kind.__init__, "__kwdefaults__", None) or {}
            for name, value in defaults.items():
                if value is clock:
                    yield defaults, name
