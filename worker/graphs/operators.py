"""What an ATen operator does, as far as a graph cares: waiting, randomness, views, writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_MASK_DTYPES = (torch.bool, torch.uint8)
_GROWING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::pin_memory", "aten::_pin_memory"})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the (nested) arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def bound_arguments(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema; defaults filled in."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def written_tensors(func: OpOverload, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments whose memory the operator writes to."""
    if torch.Tag.inplace_view in func.tags:
        return
    for argument in func._schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            yield from tensors_in(arguments.get(argument.name))


def is_host_read(func: OpOverload) -> bool:
    """Whether the host waits for a value: `.item()`, `equal`, `allclose`, ..."""
    return torch.Tag.data_dependent_output in func.tags


def has_data_dependent_shape(func: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether the output's shape, and so a wait of the host, depends on values."""
    name = func._schema.name
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masked = any(tensor.dtype in _MASK_DTYPES for tensor in tensors_in(arguments.get("indices")))
        return masked and not _is_masked_fill(name, arguments)
    return torch.Tag.dynamic_output_shape in func.tags


def host_copy(func: OpOverload, arguments: Mapping[str, Any], result: Any) -> str | None:
    """How the operator copies between host and device in a way that makes the host wait, or None."""
    if func._schema.name not in ("aten::_to_copy", "aten::copy_"):
        return None
    source = arguments.get("self") if func._schema.name == "aten::_to_copy" else arguments.get("src")
    target = next(tensors_in(result), None)
    if not isinstance(source, Tensor) or target is None or source.device.type == target.device.type:
        return None
    if arguments.get("non_blocking") and "cpu" in (source.device.type, target.device.type):
        host = source if source.device.type == "cpu" else target
        if host.is_pinned():
            return None
    return f"{func} copies from {source.device} to {target.device}"


def changes_memory(func: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether the operator re-allocates a tensor in place, or pins host memory."""
    return func._schema.name in _GROWING or bool(arguments.get("pin_memory"))


def is_random(func: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers (attention without dropout does not)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if arguments.get("dropout_p") == 0 or arguments.get("train") is False:
        return False
    return not (func._schema.name == "aten::native_dropout" and arguments.get("p") == 0)


def is_default_generator(generator: torch.Generator) -> bool:
    """Whether it is the generator that operators use when none is named."""
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return any(is_same_generator(generator, default) for default in defaults)


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two Python objects stand for one generator; operators see an object of their own.

    Two generators of one device in exactly the same state count as one.
    """
    if one is other:
        return True
    if one.device != other.device or one.initial_seed() != other.initial_seed():
        return False
    return torch.equal(one.get_state(), other.get_state())


def _is_masked_fill(name: str, arguments: Mapping[str, Any]) -> bool:
    """Assigning one host scalar through a mask is a masked fill, which needs no wait."""
    values = arguments.get("values")
    is_put = name != "aten::index" and not arguments.get("accumulate")
    return is_put and isinstance(values, Tensor) and values.numel() == 1 and values.device.type == "cpu"
