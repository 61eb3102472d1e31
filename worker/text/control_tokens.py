"""Tokens that steer the model, and keeping user text from becoming them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken


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

    The stand-ins hold a random number and digits only: they cannot be guessed, and trimming, case or quoting in the
    template leaves them as they are.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._nonce = f"{secrets.randbits(64):020}"
        self._strings: list[str] = []
        self._stand_in = re.compile(f"\ue000{self._nonce}(\\d{{8}})\ue001")

    def put_on(self, text: str) -> str:
        """`text` with every control token's string replaced by a stand-in."""
        return text if self._control.pattern is None else self._control.pattern.sub(self._replace, text)

    def take_off(self, text: str) -> list[tuple[str, bool]]:
        """Pieces of a rendered text in order: (text, whether it is a control token's string that a user wrote)."""
        pieces = []
        for index, piece in enumerate(self._stand_in.split(text)):
            pieces.append((self._strings[int(piece)], True) if index % 2 else (piece, False))
        return pieces

    def shows_in(self, text: str) -> bool:
        """Whether a stand-in was torn apart and would be seen."""
        return self._nonce in text

    def _replace(self, match: re.Match[str]) -> str:
        self._strings.append(match[0])
        return f"\ue000{self._nonce}{len(self._strings) - 1:08}\ue001"
