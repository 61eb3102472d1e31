"""Calls that stand for Triton's, for processes that compile kernels: what they do there happens when they are read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Options:
    """Stands for a backend's."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class Does:
    """Where it is read, a call of `function`; an integer for a source comes of it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def a_call(src: Any) -> Callable[[], Any]:
    """As Triton hands one over: its arguments are in the closure."""
    target, options, env_vars = "nothing", Options(num_warps=4), {"name": "value"}

    def compile_kernel() -> Any:
        return src, target, options, env_vars

    return compile_kernel


def hangs() -> Callable[[], Any]:
    """A kernel that takes a minute."""
    return a_call(Does(time.sleep, 60))


def dies() -> Callable[[], Any]:
    """A kernel that ends the process that compiles it."""
    return a_call(Does(os._exit, 9))


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; not one that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Those of a process of one thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_until(is_so: Callable[[], bool], within_s: float = 20.0) -> None:
    """Raises AssertionError when it is not in time."""
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)
