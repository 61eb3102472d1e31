"""The process behind BuildProcesses: `python -m worker.kernels.build_server NUM PARENT`, with a socket as its input."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import signal
import sys
from collections import deque
from multiprocessing.connection import Connection, wait
from pathlib import Path

from worker.kernels.build_fork import BuildFork
from worker.kernels.build_job import BuildJob
from worker.kernels.cache_entry import whole_kernel
from worker.kernels.cache_key import settle_key

log = logging.getLogger(__name__)

NICENESS = 5
"""Requests that are served meanwhile come first."""
OOM_SCORE = "500"
"""And where memory runs out, these processes go first."""
TICK_S = 1.0
"""How often it is looked whether a kernel is late, or the worker gone."""


def main() -> None:
    """Serve jobs until their pipe ends, which it does with the process at its other end. Exits with 1 if it cannot begin."""
    jobs = take_over()
    try:
        import_kernels()
    except Exception as error:  # noqa: BLE001  # the worker finds out by itself, and says where
        log.error("kernels cannot be built here: %s: %.200s", type(error).__name__, error)
        sys.exit(1)
    BuildServer(jobs, num=int(sys.argv[1]), parent=int(sys.argv[2])).serve()


class BuildServer:
    """Gives jobs to processes forked from this one, at most `num`, each one at a time.

    It has one thread, and compiles nothing itself: nothing but its own memory is lost with one of them, and another is
    forked when there is work for it. What none can do is refused, with the reason.
    """

    def __init__(self, jobs: Connection, *, num: int, parent: int) -> None:
        self._jobs = jobs
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
            made = BuildFork.start(build, [self._jobs, *(fork.connection for fork in self._forks)])
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


def take_over() -> Connection:
    """The socket that is this process's input; from then on, nothing of the parent's is in the way.

    Signals do what they do by default, also where the parent ignores or blocks them. What prints goes to the log.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    jobs = Connection(os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(OSError):  # there may be no log
        os.dup2(2, 1)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    return jobs


def import_kernels() -> None:
    """What every job needs, so that forked processes have it already."""
    import triton  # noqa: F401
    from triton.runtime.cache import triton_key

    import worker.kernels

    for module in pkgutil.iter_modules(worker.kernels.__path__):
        try:
            importlib.import_module(f"worker.kernels.{module.name}")
        except Exception as error:  # noqa: BLE001  # written for another Triton
            log.debug("%s is left out: %s", module.name, error)
    triton_key()  # reads the whole compiler


def build(pickled: bytes) -> str:
    """Compile a kernel, and the stub that launches it; both go to Triton's cache. Why it cannot be; empty = done."""
    try:
        job = BuildJob.unpickled(pickled)
        settle_key(job.source.fn)
        kernel = whole_kernel(job.compile, job)
    except Exception as error:  # noqa: BLE001  # the caller builds it, and says what is wrong with it
        return f"{type(error).__name__}: {error}"[:1000]
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:  # noqa: BLE001
        log.debug("%s has no stub yet: %s: %s", kernel.name, type(error).__name__, error)
    return ""


if __name__ == "__main__":
    main()
