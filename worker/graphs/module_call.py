"""A call of a module, taken apart: tensors become static buffers, everything else is baked in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.graphs.errors import InputMismatch
from worker.graphs.region import CaptureRegion, module_tables

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class ModuleCall:
    """The arguments of one call, with the tensors replaced by static buffers of the same shape.

    Tensors inside (nested) lists, tuples and dicts count as inputs; a tensor inside any other object does not, and the
    object itself must be the same at every replay.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self.tensors: dict[str, Tensor] = {}
        self._baked: dict[str, Any] = {}
        for name, value in _leaves(self._args, self._kwargs):
            if isinstance(value, Tensor):
                self.tensors[name] = value
            else:
                self._baked[name] = value

    @property
    def signature(self) -> tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]:
        """Name, shape, dtype and device of every tensor."""
        return tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items())

    def as_static(self, static: Mapping[str, Tensor] | None = None) -> ModuleCall:
        """The same call on buffers of its own: `static` where given, clones of the tensors elsewhere.

        Raises InputMismatch unless each buffer fits its tensor.
        """
        static = static or {}
        for name, buffer in static.items():
            problem = difference(self.tensors[name], buffer) if name in self.tensors else "is not an argument"
            if problem or not buffer.is_contiguous():
                raise InputMismatch(f"static input {name} {problem or 'is not contiguous'}")
        buffers = {name: static.get(name, tensor).detach() for name, tensor in self.tensors.items()}
        buffers = {name: buffer if name in static else buffer.clone() for name, buffer in buffers.items()}
        args = tuple(_rebuild(str(index), value, buffers) for index, value in enumerate(self._args))
        kwargs = {name: _rebuild(name, value, buffers) for name, value in self._kwargs.items()}
        return ModuleCall(args, kwargs)

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any], key: str = "") -> dict[str, Tensor]:
        """Tensors of another call by name. Raises InputMismatch if it differs in structure or in a baked value."""
        found = dict(_leaves(args, kwargs))
        expected = self.tensors.keys() | self._baked.keys()
        if found.keys() != expected:
            missing, extra = sorted(expected - found.keys()), sorted(found.keys() - expected)
            raise InputMismatch(f"arguments missing: {missing or 'none'}, unexpected: {extra or 'none'}", key=key)
        for name, value in self._baked.items():
            if not _same(value, found[name]):
                raise InputMismatch(f"argument {name} was captured as {value!r:.80}, now {found[name]!r:.80}", key=key)
        tensors = {name: value for name, value in found.items() if name in self.tensors}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise InputMismatch(f"argument {name} was captured as a tensor, now {value!r:.80}", key=key)
        return tensors

    def region(self, module: nn.Module, *, forward: Callable[..., Any] | None = None, **options: Any) -> CaptureRegion:
        """A region that calls the module (or `forward`) on this call's tensors, without autograd.

        `options` are those of CaptureRegion.
        """
        function = forward or module

        def run() -> Any:
            with torch.no_grad():
                return function(*self._args, **self._kwargs)

        return CaptureRegion(run=run, inputs=self.tensors, constants=module_tables(module), **options)


def difference(captured: Tensor, given: Tensor) -> str:
    """How an input differs from its captured form; empty if it fits. Host tensors fit any device."""
    if given.shape != captured.shape:
        return f"was captured with shape {list(captured.shape)}, now {list(given.shape)}"
    if given.dtype != captured.dtype:
        return f"was captured as {captured.dtype}, now {given.dtype}"
    if given.device != captured.device and given.device.type != "cpu":
        return f"was captured on {captured.device}, now {given.device}"
    return ""


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args):
        yield from _walk(str(index), value)
    for name, value in kwargs.items():
        yield from _walk(name, value)


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield f"{name}.len", len(value)
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _walk(f"{name}.{key}", item)
    else:
        yield name, value


def _rebuild(name: str, value: Any, buffers: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return buffers[name]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuild(f"{name}.{index}", item, buffers) for index, item in enumerate(value)))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_rebuild(f"{name}.{index}", item, buffers) for index, item in enumerate(value))
    if type(value) is dict:
        return {key: _rebuild(f"{name}.{key}", item, buffers) for key, item in value.items()}
    return value


def _same(captured: Any, given: Any) -> bool:
    if captured is given:
        return True
    return isinstance(captured, _PLAIN) and type(captured) is type(given) and bool(captured == given)
