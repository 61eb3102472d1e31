"""Counts just-in-time compilations, to know when warm-up has settled and that a capture compiled nothing."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, Self


class CompileWatch:
    """While entered, counts what this thread has Triton build, and torch.compile. Compilers that are not loaded yet count
    from when they are.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._triton_builds = 0
        self._dynamo_frames = 0
        self._knobs: Any = None
        self._listener: Any = None

    def __enter__(self) -> Self:
        self._dynamo_frames = _dynamo_frames()
        self._knobs = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
        if self._knobs is not None and hasattr(self._knobs, "listener"):
            self._listener = self._knobs.listener
            self._knobs.listener = self._on_triton_build
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._knobs is not None and hasattr(self._knobs, "listener"):
            self._knobs.listener = self._listener

    @property
    def builds(self) -> int:
        """Compilations since the block was entered."""
        return self._triton_builds + _dynamo_frames() - self._dynamo_frames

    def _on_triton_build(self, *args: Any, **kwargs: Any) -> None:
        self._triton_builds += threading.get_ident() == self._thread  # others may build ahead meanwhile
        if self._listener is not None:
            self._listener(*args, **kwargs)


def _dynamo_frames() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0
