"""The process behind BuildProcesses: `python -m worker.kernels.build_server NUM`, with jobs and answers on its pipes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

log = logging.getLogger(__name__)

NICENESS = 5
"""Requests that are served meanwhile come first."""


def main() -> None:
    """Serve jobs until their pipe ends, which it does with the process at its other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to parent and child alike
    jobs, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # nothing that prints may reach the answers
    os.nice(NICENESS)
    import_kernels()
    with ProcessPoolExecutor(int(sys.argv[1]), mp_context=multiprocessing.get_context("fork")) as processes:
        try:
            while True:
                number, job = pickle.loads(jobs.recv_bytes())  # noqa: S301 (from the worker that started this)
                processes.submit(build, job).add_done_callback(partial(_answer, answers, number))
        except EOFError:
            processes.shutdown(cancel_futures=True)


def import_kernels() -> None:
    """What every job needs, so that forked processes have it already."""
    import triton  # noqa: F401
    from triton.runtime.cache import triton_key

    import worker.kernels

    for module in pkgutil.iter_modules(worker.kernels.__path__):
        try:
            importlib.import_module(f"worker.kernels.{module.name}")
        except ImportError as error:
            log.debug("%s is left out: %s", module.name, error)  # written for another Triton
    triton_key()  # reads the whole compiler


def build(job: bytes) -> None:
    """Compile a kernel, and the stub that launches it; both go to Triton's cache."""
    import triton

    from worker.kernels.cache_key import settle_key

    source, target, options, env_vars = pickle.loads(job)  # noqa: S301 (see main)
    settle_key(source.fn)
    kernel = triton.compile(source, target=target, options=options, _env_vars=env_vars)
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:  # noqa: BLE001
        log.debug("%s has no stub yet: %s: %s", kernel.name, type(error).__name__, error)


def _answer(answers: Connection, number: int, done: Future[None]) -> None:
    """Empty = done. A process that died has taken the others with it: the caller builds by itself then."""
    error = None if done.cancelled() else done.exception()
    refused = f"{type(error).__name__}: {error}"[:1000] if error else "cancelled" if done.cancelled() else ""
    with contextlib.suppress(OSError):  # nobody waits any more
        answers.send_bytes(pickle.dumps((number, refused)))


if __name__ == "__main__":
    main()
