"""Options that several benchmarks take."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder_path(text: str) -> Path:
    """Type of an option; no text at all, such as that of an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, must name a folder")
    return Path(text)


def add_plan_options(parser: argparse.ArgumentParser, standard: object, **helps: str | None) -> None:
    """An option for each named field of a plan, with the type and the value it has in the standard one."""
    for name, help_text in helps.items():
        value = getattr(standard, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=help_text)
