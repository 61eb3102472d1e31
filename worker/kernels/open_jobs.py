"""What a worker waits for from the processes that compile its kernels."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future


class OpenJobs:
    """Jobs without an answer. Each gets one: from a process, or when there will be no more of those.

    Used from any thread; nothing here blocks.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Future[str], float]] = {}
        self._count = 0
        self._answered_s = 0.0
        self._ended = ""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def have_ended(self) -> bool:
        """Whether `end` was called."""
        return bool(self._ended)

    def open(self) -> tuple[int, Future[str]]:
        """A new job's number, and why it was refused, once that is known; empty = done."""
        answer: Future[str] = Future()
        with self._lock:
            if self._ended:
                answer.set_result(self._ended)
            else:
                self._count += 1
                self._open[self._count] = answer, time.monotonic()
            return self._count, answer

    def answer(self, number: int, refused: str) -> None:
        """Answer a job; one that has its answer keeps it."""
        with self._lock:
            found = self._open.pop(number, None)
            self._answered_s = time.monotonic()
        if found is not None:
            found[0].set_result(refused)

    def is_late(self) -> bool:
        """Whether a job has waited for longer than the limit, and none was answered meanwhile: some may wait for others."""
        with self._lock:
            oldest = next(iter(self._open.values()), None)
        return oldest is not None and time.monotonic() > max(oldest[1], self._answered_s) + self._limit_s

    def end(self, why: str) -> bool:
        """Refuse what is open and what comes later. False if that was done before."""
        with self._lock:
            if self._ended:
                return False
            self._ended = why
            left = list(self._open.values())
            self._open.clear()
        for answer, _ in left:
            answer.set_result(why)
        return True
