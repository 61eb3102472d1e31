"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, holding back what could still become one.

    The first string to be completed wins, and of those completed by the same character the longest, so the outcome does
    not depend on how the text was cut. The work is proportional to characters times stop strings.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if any. Nothing may be pushed after one."""
        if not self._matchers:
            return text, None
        text, start = self._held + text, len(self._held)
        for end in range(start, len(text)):
            stop = self._advance(text[end])
            if stop is not None:
                self._held = ""
                return text[: end + 1 if self._include_stop else end + 1 - len(stop)], stop
        held = max(matcher.matched for matcher in self._matchers)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """What was held back: no more text follows that could complete it."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        complete: str | None = None
        for matcher in self._matchers:
            if matcher.advance(char) and (complete is None or len(matcher.string) > len(complete)):
                complete = matcher.string
        return complete


class _Matcher:
    """Follows one string through a stream of characters (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        """Characters at the end of the stream that are the beginning of the string."""
        self._fallback = _fallbacks(string)

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the string."""
        while self.matched and self.string[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.string[self.matched] == char:
            self.matched += 1
        if self.matched < len(self.string):
            return False
        self.matched = self._fallback[-1]
        return True


def _fallbacks(string: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    fallbacks, length = [0], 0
    for char in string[1:]:
        while length and string[length] != char:
            length = fallbacks[length - 1]
        length += string[length] == char
        fallbacks.append(length)
    return fallbacks
