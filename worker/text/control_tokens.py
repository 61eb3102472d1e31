"""Tokens that steer the model, and keeping user text from becoming them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken

from worker.errors import InvalidRequest

STAND_INS = range(0x100000, 0x10FFFE)
"""Unicode's last private use area."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The strings and ids that only a template or the model itself may bring about."""

    ids: frozenset[int]
    pattern: re.Pattern[str] | None
    """Matches any of the strings, the longest first; None when there are none."""

    @classmethod
    def among(cls, added: Iterable[tuple[int, AddedToken]], template: str) -> ControlTokens:
        """All special tokens, and those added tokens that `template` writes, such as `<tool_call>`."""
        chosen = {
            token.content: token_id
            for token_id, token in added
            if token.special or (token.content in template and not token.content.isspace())
        }
        strings = sorted((string for string in chosen if string), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, strings))) if strings else None
        return cls(frozenset(chosen.values()), pattern)

    def occurs_in(self, text: str) -> bool:
        """Whether a control token's string is somewhere in `text`."""
        return self.pattern is not None and self.pattern.search(text) is not None


class Disguise:
    """Stands in for control tokens' strings while a template runs, so that what it writes and what it was given differ.

    Each string is replaced by one character, of those Unicode leaves without meaning, that neither the template nor any
    message contains; trimming, cutting, case or quoting in the template cannot turn it into anything else.
    """

    def __init__(self, control: ControlTokens, taken: Iterable[str]) -> None:
        used = set().union(*taken)
        self._control = control
        self._free = (char for char in map(chr, STAND_INS) if char not in used)
        self._stand_ins: dict[str, str] = {}

    def put_on(self, text: str) -> str:
        """`text` with every control token's string replaced. Raises InvalidRequest when no character is left to use."""
        return text if self._control.pattern is None else self._control.pattern.sub(self._replace, text)

    def take_off(self, text: str) -> list[tuple[str, bool]]:
        """Pieces of a rendered text in order: (text, whether it is a control token's string that came from outside)."""
        strings = {stand_in: string for string, stand_in in self._stand_ins.items()}
        pieces = re.split(f"([{''.join(strings)}])", text) if strings else [text]
        return [(strings.get(piece, piece), piece in strings) for piece in pieces]

    def _replace(self, match: re.Match[str]) -> str:
        if match[0] not in self._stand_ins:
            char = next(self._free, None)
            if char is None:
                raise InvalidRequest("messages", "use up all private characters beside the name of a special token")
            self._stand_ins[match[0]] = char
        return self._stand_ins[match[0]]
