"""The garbage collector of a process that serves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def growing_heap() -> Iterator[None]:
    """Around the start of a process that serves, in which next to nothing becomes garbage: nothing is looked for.

    What is there at the end stays. See settle_heap, whose one look takes tenths of a second in a process with a model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def settle_heap() -> None:
    """Call once a process serves: what is there now stays, and full collections need not look at it.

    They would hold up every stream for more than ten milliseconds, again and again; with a model library in the process,
    for hundreds.
    """
    gc.collect()
    gc.freeze()
