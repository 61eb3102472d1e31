"""How long work at start-up tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is; 0 = not known) from the thread that does it."""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""
    del what, done, total
