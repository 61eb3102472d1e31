"""One process that compiles kernels, forked from one that has imported what that takes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

LIMIT_S = 60.0
"""For one kernel. Those of this package take a second; on a machine that does much else, ten or twenty."""
PR_SET_PDEATHSIG = 1


class BuildFork:
    """The process, seen from the one that forked it. It ends with that one, however that ends.

    Forked by a process of one thread: a fork has none of the others, and would wait for their locks for ever.
    """

    limit_s = LIMIT_S

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.job: int | None = None
        """The number of the one it is at."""
        self.connection = pipe
        """Readable when it has answered, or has ended."""
        self._until_s = 0.0
        self._is_killed = False

    @classmethod
    def start(cls, build: Callable[[bytes], str], unwanted: Iterable[Connection]) -> BuildFork:
        """Fork one, which answers each job by `build` and closes what is `unwanted` in it. OSError where that cannot be."""
        libc = ctypes.CDLL(None)
        forker = os.getpid()
        ours, theirs = Pipe()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            _serve(theirs, build, [ours, *unwanted], libc, forker)
        theirs.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # it does so, too: whoever comes first
        return cls(pid, ours)

    @property
    def is_free(self) -> bool:
        """Whether it can be given a job."""
        return self.job is None and not self._is_killed

    @property
    def is_late(self) -> bool:
        """Whether its job takes longer than `limit_s`."""
        return self.job is not None and time.monotonic() > self._until_s

    def give(self, number: int, job: bytes) -> None:
        """Have it compile; it must have answered all before. OSError when it has ended."""
        self.job, self._until_s = number, time.monotonic() + self.limit_s
        self.connection.send_bytes(job)

    def answer(self) -> str:
        """What came of its job; EOFError or OSError when it has ended."""
        refused = self.connection.recv_bytes().decode(errors="replace")
        self.job = None
        return refused

    def kill(self) -> None:
        """End it, and what it has started: an assembler, a C compiler."""
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for its end, which has come; its exit code, or the negative number of a signal."""
        self.connection.close()
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return 0


def _serve(
    pipe: Connection, build: Callable[[bytes], str], unwanted: list[Connection], libc: ctypes.CDLL, forker: int
) -> NoReturn:
    """Answer jobs until the pipe ends. Whatever happens, nothing after the fork goes on in here."""
    code = 1
    try:
        with contextlib.suppress(AttributeError):  # only Linux has it
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        for connection in unwanted:
            connection.close()
        while os.getppid() == forker:  # which may have ended before the kernel was asked to say so
            pipe.send_bytes(build(pipe.recv_bytes()).encode(errors="replace"))
    except (EOFError, OSError):
        code = 0
    finally:
        os._exit(code)
