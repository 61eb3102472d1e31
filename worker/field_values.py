"""What a file or a command line gives for a config's fields. Raises ValueError naming the field and the value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def field_value(config: type[Any], name: str, value: Any) -> Any:
    """As the field holds it: lists become tuples, and the text of a folder a path, which must not be empty."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and Path in _kinds(get_type_hints(config)[name]):
        if not value:
            raise ValueError(f"{name} is {value!r}, must name a file or folder")
        return Path(value)
    return value


def check_types(config: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse a value of another type than its field. Choices are left to the class itself."""
    hints = get_type_hints(config)
    for name, value in values.items():
        kinds = _kinds(hints[name])
        if not any(_is_of(kind, value) for kind in kinds):
            raise ValueError(f"{name} is {value!r:.60}, must be {' or '.join(map(_described, kinds))}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _described(kind: Any) -> str:
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return "a list" if item is str else f"a list of {_described(item)}"
    return "absent" if kind is NoneType else str(getattr(kind, "__name__", kind))


def _is_of(kind: Any, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(get_args(kind)[0], item) for item in value)
    if not isinstance(kind, type) or get_origin(kind) is not None:
        return True
    return type(value) is kind if kind in (int, bool) else isinstance(value, kind)
