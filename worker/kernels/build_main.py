"""The process behind BuildProcesses: `python -m worker.kernels.build_main NUM PARENT`, with a socket as its input."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from worker.kernels.build_job import BuildJob
from worker.kernels.build_server import BuildServer
from worker.kernels.cache_entry import whole_kernel
from worker.kernels.cache_key import settle_key

log = logging.getLogger(__name__)

NICENESS = 5
"""Requests that are served meanwhile come first."""
OOM_SCORE = "500"
"""And where memory runs out, these processes go first."""


def main() -> None:
    """Serve jobs until their pipe ends, which it does with the process at its other end. Exits with 1 if it cannot begin."""
    jobs = take_over()
    try:
        import_kernels()
    except Exception as error:  # noqa: BLE001  # the worker finds out by itself, and says where
        log.error("kernels cannot be built here: %s: %.200s", type(error).__name__, error)
        sys.exit(1)
    BuildServer(jobs, build, num=int(sys.argv[1]), parent=int(sys.argv[2])).serve()


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
