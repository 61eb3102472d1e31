"""One kernel to be compiled: as Triton hands it to a thread, and as it goes to another process."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """The arguments of `triton.compile`."""

    source: Any
    target: Any
    options: dict[str, Any]
    env_vars: dict[str, str]

    @classmethod
    def of(cls, compile_kernel: Callable[[], Any]) -> BuildJob:
        """What Triton has put into the closure of `compile_kernel`; LookupError if it is not there."""
        try:
            held = inspect.getclosurevars(compile_kernel).nonlocals
            options = vars(held["options"])
            return cls(source=held["src"], target=held["target"], options=options, env_vars=held["env_vars"])
        except TypeError as error:  # no function, or no such options
            raise LookupError(str(error)) from error

    @classmethod
    def unpickled(cls, pickled: bytes) -> BuildJob:
        """From `pickled`, in a process that the worker has started: nothing else can write to it."""
        source, target, options, env_vars = pickle.loads(pickled)  # noqa: S301
        return cls(source=source, target=target, options=options, env_vars=env_vars)

    def pickled(self) -> bytes:
        """For `unpickled`. Raises what pickle raises."""
        out = io.BytesIO()
        _Pickler(out).dump((self.source, self.target, self.options, self.env_vars))
        return out.getvalue()

    def compile(self) -> Any:
        """Triton's kernel, from its cache if it is there."""
        import triton

        return triton.compile(self.source, target=self.target, options=self.options, _env_vars=self.env_vars)


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
