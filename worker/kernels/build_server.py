"""What stands between a worker and the processes that compile its kernels, and outlives neither."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from worker.kernels.build_fork import BuildFork

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often it is looked whether a kernel is late, or the worker gone."""


class BuildServer:
    """Gives the jobs of the process `parent` to processes forked from this one, at most `num`, one at a time to each.

    It has one thread, and compiles nothing itself: with one of them no more is lost than its job, which is refused, with
    the reason, and another is forked when there is work for it.
    """

    def __init__(self, jobs: Connection, build: Callable[[bytes], str], *, num: int, parent: int) -> None:
        self._jobs = jobs
        self._build = build
        self._num = num
        self._parent = parent
        self._forks: list[BuildFork] = []
        self._waiting: deque[tuple[int, bytes]] = deque()

    def serve(self) -> None:
        """Until the parent has ended, or nothing can be forked."""
        try:
            while len(self._forks) < self._num and not self._jobs.poll():
                self._fork()
            while self._num and os.getppid() == self._parent:
                self._hand_out()
                self._turn()
        except (EOFError, OSError):
            pass
        finally:
            for fork in self._forks:
                fork.kill()

    def _hand_out(self) -> None:
        while self._waiting and (free := self._free()) is not None:
            number, job = self._waiting.popleft()
            try:
                free.give(number, job)
            except OSError:  # it has ended, which shows in the next turn
                continue

    def _free(self) -> BuildFork | None:
        """One without a job, forked if there is room for it."""
        free = next((fork for fork in self._forks if fork.is_free), None)
        return self._fork() if free is None and len(self._forks) < self._num else free

    def _fork(self) -> BuildFork | None:
        """One more, or None where there can be no more than there are."""
        try:
            made = BuildFork.start(self._build, [self._jobs, *(fork.connection for fork in self._forks)])
        except OSError as error:
            log.warning("kernels are built in %d processes, not %d: %s", len(self._forks), self._num, error)
            self._num = len(self._forks)
            return None
        self._forks.append(made)
        return made

    def _turn(self) -> None:
        """Take what has come: jobs, answers, ends of processes."""
        forks = {fork.connection: fork for fork in self._forks}
        for ready in wait([self._jobs, *forks], TICK_S):
            if isinstance(ready, Connection) and ready in forks:
                self._collect(forks[ready])
            else:
                number, _, job = self._jobs.recv_bytes().partition(b" ")
                self._waiting.append((int(number), job))
        for fork in self._forks:
            if fork.is_late:
                self._refuse(fork, f"it took longer than {fork.limit_s:.0f} s")
                fork.kill()

    def _collect(self, fork: BuildFork) -> None:
        number = fork.job
        try:
            refused = fork.answer()
        except (EOFError, OSError):
            self._forks.remove(fork)
            self._refuse(fork, f"the process that compiled it ended with exit code {fork.reap()}")
        else:
            self._answer(number, refused)

    def _refuse(self, fork: BuildFork, why: str) -> None:
        self._answer(fork.job, why)
        fork.job = None

    def _answer(self, number: int | None, refused: str) -> None:
        """Empty = done; the caller builds by itself what is refused."""
        if number is not None:
            self._jobs.send_bytes(f"{number} {refused}".encode(errors="replace"))
