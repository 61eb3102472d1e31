"""A dispatch mode that does not load torch's compiler where nobody compiles."""

from __future__ import annotations

import functools
import sys
from typing import Any, Self

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorMode(TorchDispatchMode):
    """While entered, every operator of this thread goes through `on_operator`, which runs it and returns its result.

    Composite operators, which arrive whole in inference mode, are taken apart first: what they consist of is seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_hidden = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the hiding is done in __enter__: by default it would import the compiler, which takes a second

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules and not self._is_hidden:
            self._is_hidden = True
            self.on_operator = torch.compiler.disable(self.on_operator)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, OpOverload) and _is_composite(func):
            with self:
                # Not `decompose`: it may choose a decomposition in Python that loads torch's symbolic shapes.
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        return self.on_operator(func, args, kwargs or {})

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator. Subclasses look at it before or after."""
        return func(*args, **kwargs)


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd")
