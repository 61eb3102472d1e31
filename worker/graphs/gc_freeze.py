"""Keeps the garbage collector out of a capture: a finalizer that frees CUDA objects would end it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_gc(*, collect: bool = True) -> Iterator[None]:
    """No collection runs inside.

    `collect` collects first, which takes a good part of a second in a process with a model, and leaves what exists then
    out of collections until the end of the block. A freeze that was in force before stays in force.
    """
    was_enabled = gc.isenabled()
    freezes = collect and gc.get_freeze_count() == 0  # counting takes tens of milliseconds where much is frozen
    if collect:
        gc.collect()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
