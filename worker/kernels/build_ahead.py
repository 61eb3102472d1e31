"""Builds kernels before anything is launched, many at once: one after the other, they are most of a first start."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree

from worker.graphs import operators
from worker.graphs.operator_mode import OperatorMode
from worker.kernels.build_processes import BuildProcesses
from worker.kernels.cache_key import settle_key
from worker.kernels.device import has_triton

log = logging.getLogger(__name__)

Step = Callable[[], object]

MAX_THREADS = 16
"""That build in this process. Most of that work holds the interpreter's lock."""


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

        self._processes = processes
        num_threads = processes.num if processes else min(MAX_THREADS, len(os.sched_getaffinity(0)))
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="build")
        self._mode = AsyncCompileMode(_Builders(threads, processes), ignore_errors=True)
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
        with self._building(asked), _nothing_launched(), _NothingRuns(), torch.inference_mode():
            try:
                step()
            except Exception as error:  # noqa: BLE001  # its first run will say it
                log.warning("a step could not be gone through ahead: %s: %.200s", type(error).__name__, error)
        return list({id(kernel): kernel for kernel in asked}.values())

    def settle(self, kernels: Iterable[Any] | None = None, *, wait_s: float | None = None) -> bool:
        """Wait for `kernels`, or for all, and have them ready to launch. False if that takes longer than `wait_s`."""
        until = None if wait_s is None else time.monotonic() + wait_s
        for kernel in list(self._pending.values()) if kernels is None else kernels:
            with contextlib.suppress(Exception):
                kernel.future.exception(None if until is None else max(0.0, until - time.monotonic()))
            if not kernel.future.done():
                return False
            kernel.result(ignore_errors=True)
            self._pending.pop(id(kernel), None)
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


class _Builders:
    """Of an executor, what Triton's mode needs. A thread waits for the process that builds, then takes what it has made."""

    def __init__(self, threads: ThreadPoolExecutor, processes: BuildProcesses | None) -> None:
        self._threads = threads
        self._processes = processes

    def submit(self, compile_kernel: Callable[[], Any]) -> Any:
        """See concurrent.futures.Executor."""
        return self._threads.submit(self._build, compile_kernel)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        if self._processes is not None:
            self._processes.build(compile_kernel)
        return compile_kernel()


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    """Launches by this thread build their kernel and stop there."""
    from triton.runtime.jit import JITFunction

    run, thread = JITFunction.run, threading.get_ident()

    @functools.wraps(run)
    def build(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, warmup=warmup, **kwargs)
        settle_key(self)
        return run(self, *args, warmup=True, **kwargs)

    JITFunction.run = build
    try:
        yield
    finally:
        JITFunction.run = run


class _NothingRuns(OperatorMode):
    """Operators give what they would give, with other values in it; what would write leaves everything as it is.

    They run on what happens to be in memory: to ask for shapes alone would load torch's symbolic shapes, which takes
    seconds. Whole numbers are taken for zeros, so that no index is out of bounds.
    """

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See OperatorMode."""
        if isinstance(func, OpOverload) and not func.is_view:
            if operators.is_host_read(func):
                raise RuntimeError(f"{func} asks for a value")
            if func._schema.is_mutable:
                return _written(func, args, kwargs)
            args, kwargs = _pytree.tree_map(_without_indices, args), _pytree.tree_map(_without_indices, kwargs)
        return func(*args, **kwargs)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes into its arguments returns: those arguments."""
    places = func._schema.arguments
    values = {place.name: value for place, value in zip(places, args, strict=False)} | kwargs
    written = tuple(
        values[place.name]
        for place in places
        if place.alias_info is not None and place.alias_info.is_write and place.name in values
    )
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else written


def _without_indices(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
        return leaf
    return torch.zeros_like(leaf)
