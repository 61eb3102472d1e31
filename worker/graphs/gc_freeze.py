"""Keeps the garbage collector out of a capture: a finalizer that frees CUDA objects would end it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_gc(*, collect: bool = True) -> Iterator[None]:
    """No collection runs inside; what exists already is left out of later ones until the end of the block.

    `collect` collects first, which takes a good part of a second in a process with a model. A freeze that was in force
    before stays in force.
    """
    was_enabled = gc.isenabled()
    was_frozen = gc.get_freeze_count() > 0
    if collect:
        gc.collect()
    gc.disable()
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
