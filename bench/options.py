"""Options that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def bench_parser(description: str | None, *, prog: str | None = None) -> argparse.ArgumentParser:
    """Shows a module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse_for_gpu(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a benchmark that runs on a GPU unless its `--device`, where it has one, says otherwise.

    Ends the program as `require_gpu` does.
    """
    options = parser.parse_args(arguments)
    require_gpu(parser, getattr(options, "device", "cuda"))
    return options


def require_gpu(parser: argparse.ArgumentParser, device: str = "cuda") -> None:
    """End the program, with one line and exit code 1, where `device` is CUDA and torch finds none."""
    if not device.startswith("cuda"):
        return
    import torch  # benchmarks that need no GPU go without

    if not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: needs a CUDA GPU, and there is none that torch could use\n")


def folder_path(text: str) -> Path:
    """Type of an option; no text at all, such as that of an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, must name a folder")
    return Path(text)


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Type of an argument that is one of `names`; unlike `choices`, also of one that may be left out."""
    known = list(names)

    def chosen(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"is {text!r}, must be one of {', '.join(known)}")
        return text

    return chosen


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Type of an option that lists some of `names`, a comma between them."""
    chosen = one_of(names)
    return lambda text: [chosen(part) for part in text.split(",")]


def add_plan_options(parser: argparse.ArgumentParser, standard: object, **helps: str | None) -> None:
    """An option for each named field of a plan, with the type and the value it has in the standard one."""
    for name, help_text in helps.items():
        value = getattr(standard, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=help_text)
