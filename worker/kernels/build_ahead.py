"""Builds kernels before anything is launched, many at once: one after the other, they are most of a first start."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from worker.kernels.build_processes import BuildProcesses
from worker.kernels.build_threads import BuildThreads
from worker.kernels.device import has_triton
from worker.kernels.nothing_runs import NothingRuns, nothing_launched

log = logging.getLogger(__name__)

Step = Callable[[], object]


def can_build_ahead() -> bool:
    """Whether kernels are compiled here, by a Triton that can do so on other threads."""
    if not has_triton():
        return False
    import triton

    try:
        from triton.runtime._async_compile import AsyncCompileMode  # noqa: F401
    except ImportError:
        return False
    return not triton.knobs.runtime.interpret


def build_ahead(steps: Iterable[Step], processes: BuildProcesses | None = None) -> int:
    """Go through each step and wait until what it would launch is built; returns how many kernels that were.

    See KernelsAhead.
    """
    ahead = KernelsAhead(processes)
    for step in steps:
        ahead.go_through(step)
    ahead.settle()
    return ahead.num_asked


class KernelsAhead:
    """Kernels on their way: in `processes`, or on threads of this process without them or where one of them fails.

    Used by the thread that launches. A kernel that cannot be built is left to its first launch, which says why.
    """

    def __init__(self, processes: BuildProcesses | None = None) -> None:
        from triton.runtime._async_compile import AsyncCompileMode

        self._threads = BuildThreads(processes)
        self._mode = AsyncCompileMode(self._threads, ignore_errors=True)
        self._pending: dict[int, Any] = {}

    @property
    def num_asked(self) -> int:
        """Kernels so far."""
        return len(self._mode.raw_futures)

    @property
    def num_pending(self) -> int:
        """Those that `settle` has not seen built yet."""
        return len(self._pending)

    def go_through(self, step: Step) -> list[Any]:
        """Begin to build what `step` launches; the kernels that were not built already.

        In it, operators give tensors of the right shape, and launches launch nothing: it must not decide anything by
        values, nor leave anything behind. A step that cannot be gone through is left to its first run.
        """
        asked: list[Any] = []
        self._threads.asker = threading.current_thread()
        with self._building(asked), nothing_launched(), NothingRuns(), torch.inference_mode():
            try:
                step()
            except Exception as error:  # noqa: BLE001  # its first run will say it
                log.warning("a step could not be gone through ahead: %s: %.200s", type(error).__name__, error)
        return list({id(kernel): kernel for kernel in asked}.values())

    def settle(self, kernels: Iterable[Any] | None = None, *, wait_s: float | None = None) -> bool:
        """Wait for `kernels`, or for all, and have them ready to launch. False if that takes longer than `wait_s`.

        When it is interrupted, no more is begun: an interpreter that ends waits for all that its threads have to do.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        try:
            for kernel in list(self._pending.values()) if kernels is None else kernels:
                with contextlib.suppress(Exception):
                    kernel.future.exception(None if until is None else max(0.0, until - time.monotonic()))
                if not kernel.future.done():
                    return False
                kernel.result(ignore_errors=True)
                self._pending.pop(id(kernel), None)
        except BaseException:
            self._threads.close()
            raise
        return True

    @contextlib.contextmanager
    def _building(self, asked: list[Any]) -> Iterator[None]:
        """Launches of this thread hand their kernel over, and add it to `asked`, if it is not there yet."""
        from triton.runtime._async_compile import active_mode

        mode = self._mode

        def submitted(*args: Any) -> Any:
            kernel = type(mode).submit(mode, *args)
            self._pending.setdefault(id(kernel), kernel)
            asked.append(kernel)
            return kernel

        mode.submit = submitted
        token = active_mode.set(mode)
        try:
            yield
        finally:
            active_mode.reset(token)
            del mode.submit  # it refers to the mode: threads that build end with that, without a collection
