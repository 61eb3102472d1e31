"""Threads that build kernels, or wait for the processes that do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from worker.cores import usable_cores
from worker.kernels.build_job import BuildJob
from worker.kernels.build_processes import BuildProcesses
from worker.kernels.cache_entry import whole_kernel

log = logging.getLogger(__name__)

MAX_HERE = 3
"""Kernels that this process compiles at once. Each holds the interpreter's lock for a quarter of its time: more than these
would take nearly all of it, and a request that is served meanwhile waits for it at every step. Nor do threads help that
have no core."""


class BuildThreads:
    """Of an executor, what Triton's mode needs. A thread waits for the process that builds, then takes what it has made."""

    def __init__(self, processes: BuildProcesses | None) -> None:
        num_here = min(MAX_HERE, usable_cores())
        self.asker: threading.Thread | None = None
        """Who launches the kernels. When it has ended, what it asked for is not begun, and nobody's exit waits for it."""
        self._processes = processes
        self._here = threading.Semaphore(num_here)
        self._threads = ThreadPoolExecutor(processes.num if processes else num_here, thread_name_prefix="build")
        self._has_said = False

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """See concurrent.futures.Executor; without a thread, the kernel is left to its first launch."""
        try:
            return self._threads.submit(self._build, compile_kernel)
        except RuntimeError as error:
            if not self._has_said:
                log.warning("kernels are built when they are first launched: %s", error)
                self._has_said = True
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Begin nothing more; does not wait for what has begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        if self.asker is not None and not self.asker.is_alive():
            raise CancelledError
        if self._processes is not None and self._processes.build(compile_kernel):
            return compile_kernel()
        with self._here:
            try:
                job = BuildJob.of(compile_kernel)
            except LookupError:  # another Triton
                return compile_kernel()
            return whole_kernel(compile_kernel, job)
