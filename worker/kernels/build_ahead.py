"""Builds kernels before anything is launched, several at once: one after the other, they are most of a first start."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree

from worker.graphs.operator_mode import OperatorMode
from worker.kernels.device import has_triton

log = logging.getLogger(__name__)

MAX_THREADS = 16
"""The assembler is a process of its own; most of what comes before it holds the interpreter's lock."""


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


def build_ahead(steps: Iterable[Callable[[], object]], *, max_threads: int = MAX_THREADS) -> int:
    """Go through each step without running anything, and build what it would launch; returns how many kernels that were.

    In a step, operators give tensors of the right shape with nothing in them, and launches launch nothing: it must not
    decide anything by values, nor leave anything behind. A step that cannot be gone through, or a kernel that cannot be
    built, is left to its first use, which says what is wrong with it.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    num_threads = min(max_threads, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="build") as threads:
        mode = AsyncCompileMode(threads, ignore_errors=True)
        try:
            with mode, _nothing_launched(), _NothingRuns(), torch.inference_mode():
                for step in steps:
                    _go_through(step)
        except Exception:
            log.exception("kernels could not be built ahead: each is built when it is first launched")
    return len(mode.raw_futures)


def _go_through(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:  # noqa: BLE001  # its first run will say it
        log.warning("a step could not be gone through ahead: %s: %.200s", type(error).__name__, error)


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    """Launches by this thread build their kernel and stop there."""
    from triton.runtime.jit import JITFunction

    run, thread = JITFunction.run, threading.get_ident()

    @functools.wraps(run)
    def build(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=warmup or threading.get_ident() == thread, **kwargs)

    JITFunction.run = build
    try:
        yield
    finally:
        JITFunction.run = run


class _NothingRuns(OperatorMode):
    """Operators give what they would give, without the values. No index is read, so none can be out of bounds."""

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See OperatorMode."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not isinstance(func, OpOverload) or not tensors or func.is_view:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        place = torch.device(kwargs.get("device") or tensors[0].device)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        found = func(*_pytree.tree_map(_shape_of, args), **_pytree.tree_map(_shape_of, kwargs))
        return _pytree.tree_map(lambda leaf: _nothing_in(leaf, place), found)


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


def _shape_of(leaf: Any) -> Any:
    return leaf.to(device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _nothing_in(leaf: Any, place: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=place)
