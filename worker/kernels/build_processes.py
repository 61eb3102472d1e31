"""Processes that compile kernels: in one process, the interpreter's lock lets threads do so one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from worker.cores import usable_cores
from worker.kernels.build_job import BuildJob
from worker.kernels.cache_folder import settle_cache_folder
from worker.kernels.open_jobs import OpenJobs

log = logging.getLogger(__name__)

MAX_PROCESSES = 16
MIN_CORES = 4
"""With fewer, importing what the processes need takes from this process what they give it."""
LIMIT_S = 90.0
"""Without any answer, the start of the server included. It ends a kernel that hangs before that: what is late here says that
the server hangs."""
TICK_S = 1.0
"""How often it is looked whether something is late."""
SERVER = "worker.kernels.build_main"


class BuildProcesses:
    """A server process, from which those that compile are forked. What they make is then found in Triton's cache.

    Starting it returns at once, and it gets ready while the caller is still importing. It ends with the caller, with
    `close`, or when nothing refers to it any more. Everything it is asked to do, the caller could do: no failure of it
    is an error. Raises OSError or RuntimeError where no process or thread can be started.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._jobs = OpenJobs(LIMIT_S)
        self._sending = threading.Lock()
        self._has_said = False
        self._pipe, theirs = Pipe()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(self._pipe.close)
            self._process = _start_server(num, theirs)
            on_failure.callback(self._process.wait)
            self._end = weakref.finalize(self, _end, self._jobs, self._process)
            on_failure.callback(self._end)
            parts = self._pipe, self._sending, self._jobs, self._process
            threading.Thread(target=_read, args=parts, name="built-kernels", daemon=True).start()
            on_failure.pop_all()

    def build(self, compile_kernel: Callable[[], Any]) -> bool:
        """Have another process do what `compile_kernel` does, a call by Triton; whether it has. Waits for it.

        A server that says nothing for LIMIT_S is ended, once, and nothing waits for one that has ended.
        """
        try:
            job = BuildJob.of(compile_kernel).pickled()
        except Exception as error:  # noqa: BLE001
            log.debug("a kernel cannot be sent to another process: %s: %.200s", type(error).__name__, error)
            return False
        number, answer = self._jobs.open()
        if not answer.done():
            self._send(number, job)
        refused = answer.result()
        if refused:
            self._say(refused)
        return not refused

    def close(self) -> None:
        """End the server and what it is building."""
        self._end()

    def _say(self, refused: str) -> None:
        """The first time, aloud: others that follow mostly have the same reason."""
        level = logging.DEBUG if self._has_said or self._jobs.have_ended else logging.WARNING
        self._has_said = True
        log.log(level, "a kernel is built in this process, not in another: %s", refused)

    def _send(self, number: int, job: bytes) -> None:
        """Blocks while the server reads nothing, until it is ended for that."""
        try:
            with self._sending:
                self._pipe.send_bytes(b"%d %b" % (number, job))
        except OSError:
            self._process.kill()  # of which the reader hears, if it has not ended by itself


def start_build_processes() -> BuildProcesses | None:
    """As many as there are cores to run on; None where that does not pay, or where no process can be started.

    What they and this process build is kept where it can be; see settle_cache_folder.
    """
    settle_cache_folder()
    cores = usable_cores()
    if cores < MIN_CORES:
        return None
    try:
        return BuildProcesses(min(cores, MAX_PROCESSES))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        log.warning("kernels are built in this process alone: %s", error)
        return None


def _start_server(num: int, pipe: Connection) -> subprocess.Popen[bytes]:
    """With its end of the pipe as standard input. A terminal's Ctrl-C is this process's alone."""
    path = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return subprocess.Popen(  # noqa: S603 (this interpreter, on a module of ours, found where this one finds it)
        [sys.executable, "-P", "-m", SERVER, str(num), str(os.getpid())],
        stdin=pipe.fileno(),
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        process_group=0,
    )


def _end(jobs: OpenJobs, process: subprocess.Popen[bytes]) -> None:
    jobs.end("the processes that build kernels were closed")
    process.kill()


def _read(pipe: Connection, sending: threading.Lock, jobs: OpenJobs, process: subprocess.Popen[bytes]) -> None:
    """Pass answers on until the server has ended, or is ended for being late; what is then open is refused."""
    why = "their server has ended"
    try:
        while not jobs.is_late():
            if pipe.poll(TICK_S):
                number, _, refused = pipe.recv_bytes().decode(errors="replace").partition(" ")
                jobs.answer(int(number), refused)
        why = f"nothing came of any within {LIMIT_S:.0f} s"
        process.kill()
    except (EOFError, OSError):
        pass
    finally:
        code = _exit_code(process)
        if jobs.end(why):
            log.warning("kernels are built in this process from now on: %s (exit code %d)", why, code)
        with sending:  # whoever had it has failed
            pipe.close()


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Of one that has closed its pipe, the last that it does."""
    try:
        return process.wait(TICK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
