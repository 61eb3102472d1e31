"""Processes that compile kernels: in one process, the interpreter's lock lets threads do so one after the other."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

log = logging.getLogger(__name__)

MAX_PROCESSES = 16
MIN_CORES = 4
"""With fewer, importing what the processes need takes from this process what they give it."""
LIMIT_S = 60.0
"""For one kernel, and for those before it and the start of the server."""
SERVER = "worker.kernels.build_server"


class BuildProcesses:
    """A server process, from which those that compile are forked. What they make is then found in Triton's cache.

    Starting it returns at once, and it gets ready while the caller is still importing. It ends with the caller, with
    `close`, or when nothing refers to it any more. Everything it is asked to do, the caller could do: no failure of it
    is an error.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._jobs: dict[int, Future[str]] = {}
        self._lock = threading.Lock()
        self._count = 0
        path = os.pathsep.join(place for place in sys.path if place)
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter, on a module of ours)
            [sys.executable, "-m", SERVER, str(num)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._in = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._end = weakref.finalize(self, self._out.close)
        reader = threading.Thread(
            target=_read, args=(self._in, self._jobs, self._lock, self._process), name="built-kernels", daemon=True
        )
        reader.start()

    def build(self, compile_kernel: Callable[[], Any]) -> bool:
        """Have another process do what `compile_kernel` does, a call by Triton; whether it has. Waits for it."""
        try:
            job = pickled_job(compile_kernel)
        except Exception as error:  # noqa: BLE001
            log.debug("a kernel cannot be sent to another process: %s: %s", type(error).__name__, error)
            return False
        done: Future[str] = Future()
        try:
            with self._lock:
                self._count += 1
                self._jobs[self._count] = done
                self._out.send_bytes(pickle.dumps((self._count, job)))
        except OSError:
            return False
        try:
            refused = done.result(LIMIT_S)
        except TimeoutError:
            refused = f"nothing came of it within {LIMIT_S:.0f} s"
        if refused:
            log.debug("a kernel was not built by another process: %s", refused)
        return not refused

    def close(self) -> None:
        """End the server when what it is building is built."""
        self._end()


def start_build_processes() -> BuildProcesses | None:
    """As many as there are cores to run on; None where that does not pay, or where no process can be started."""
    cores = len(os.sched_getaffinity(0))
    if cores < MIN_CORES:
        return None
    try:
        return BuildProcesses(min(cores, MAX_PROCESSES))
    except OSError as error:
        log.warning("kernels are built in this process alone: %s", error)
        return None


def pickled_job(compile_kernel: Callable[[], Any]) -> bytes:
    """The arguments of `triton.compile`, which Triton has put into a closure; LookupError if they are not there."""
    held = inspect.getclosurevars(compile_kernel).nonlocals
    out = io.BytesIO()
    _Pickler(out).dump((held["src"], held["target"], held["options"].__dict__, held["env_vars"]))
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Functions of kernels go by name: they hold locks, and must be the other process's own."""

    def reducer_override(self, value: Any) -> Any:
        from triton.runtime.jit import JITCallable

        if isinstance(value, JITCallable):
            return _function, (value.__module__, value.__qualname__)
        return NotImplemented


def _function(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _read(answers: Connection, jobs: dict[int, Future[str]], lock: threading.Lock, process: Any) -> None:
    """Pass answers on until the server has ended; what is then still open is refused."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, refused = pickle.loads(answers.recv_bytes())  # noqa: S301 (from the server that this started)
            with lock:
                done = jobs.pop(number)
            done.set_result(refused)
    with lock:
        left = list(jobs.values())
        jobs.clear()
    for done in left:
        done.set_result("the server has ended")
    answers.close()
    process.wait()
