"""A step gone through for what it would launch: nothing is launched, and nothing that it writes to changes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree

from worker.graphs import operators
from worker.graphs.operator_mode import OperatorMode
from worker.kernels.cache_key import settle_key

_taking_launches = threading.Lock()
"""Two that replace Triton's way to launch at once could put each other's back, for good."""


@contextlib.contextmanager
def nothing_launched() -> Iterator[None]:
    """Launches by this thread build their kernel and stop there."""
    from triton.runtime.jit import JITFunction

    with _taking_launches:
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


class NothingRuns(OperatorMode):
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
