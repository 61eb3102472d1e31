"""Writing a model's words to a terminal."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without control characters: a model could otherwise move the cursor or rename the window."""
    return _CONTROL.sub("", text)


def write(text: str) -> None:
    """Show a piece of an answer at once; to a file or a pipe it goes unchanged."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
