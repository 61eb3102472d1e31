"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SHORT = {"k": "kib", "m": "mib", "g": "gib", "b": ""}


def parse_bytes(text: str) -> int:
    """Parse "141GB", "24GiB", "512M" (binary) or plain bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].lower() if match else None
    scale = None if unit is None else _UNITS.get(_SHORT.get(unit, unit))
    if match is None or scale is None or not float(match[1]) * scale >= 1:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as 141GB or 24GiB")
    return int(float(match[1]) * scale)


def show_bytes(num_bytes: int) -> str:
    """In GiB or MiB, with three digits that matter."""
    if num_bytes >= 10 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
