"""When the pieces of one answer were sent."""

from __future__ import annotations

import time


class AnswerTimes:
    """On the monotonic clock, in seconds."""

    __slots__ = ("opened_s", "sent_s")

    def __init__(self) -> None:
        self.opened_s = time.monotonic()
        self.sent_s: dict[int, float] = {}
        """The latest piece of each choice."""
