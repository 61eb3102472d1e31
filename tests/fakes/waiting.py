"""Waiting for what happens on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once the condition holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the conditions are of code that has no event for a test
            await asyncio.sleep(0.005)
