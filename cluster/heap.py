"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Call once a process serves: what is there now stays, and full collections need not look at it.

    They would hold up every stream for more than ten milliseconds, again and again; with a model library in the process,
    for hundreds.
    """
    gc.collect()
    gc.freeze()
