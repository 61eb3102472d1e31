"""Waiting for something, but not for ever."""

from __future__ import annotations

import asyncio


async def happens_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set; False when that took too long."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
