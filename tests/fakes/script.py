"""What a scripted engine answers, and the tokenizer that goes with it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence

from worker.errors import InvalidRequest

VOCAB_SIZE = 512
CONTROL_IDS = {"<|end|>": 0, "<|begin|>": 1, "<|role|>": 2}
EOS = 0
FIRST_BYTE = 3
TIERS = (64, 256, 1024, 4096)


def script(prompt: Sequence[int], seed: int, choice: int, length: int) -> tuple[int, ...]:
    """The first `length` tokens of an answer: printable bytes, and the same for the same arguments anywhere."""
    return script_tokens(script_state(prompt, seed, choice), range(length))


def script_text(token_ids: Sequence[int]) -> str:
    """The text of scripted tokens."""
    return "".join(chr(token_id - FIRST_BYTE) for token_id in token_ids)


def script_state(prompt: Sequence[int], seed: int, choice: int) -> int:
    return zlib.crc32(repr((tuple(prompt), seed, choice)).encode())


def script_tokens(state: int, positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(FIRST_BYTE + 32 + ((state + 7919 * position) * 2654435761 >> 16) % 95 for position in positions)


class ScriptText:
    """A tokenizer to go with the script: one id a byte, three control ids, and a template that marks roles."""

    has_chat_template = True

    def __init__(self, on_encode: Callable[[str], None] | None = None) -> None:
        self._on_encode = on_encode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._on_encode is not None:
            self._on_encode(text)
        ids = [FIRST_BYTE + byte for byte in text.encode()]
        return [CONTROL_IDS["<|begin|>"], *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        names = {} if skip_special_tokens else {token_id: name for name, token_id in CONTROL_IDS.items()}
        pieces = [names.get(i, "").encode() if i < FIRST_BYTE else bytes([(i - FIRST_BYTE) % 256]) for i in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        for (before, _), (after, _) in itertools.pairwise(messages):
            if before == after:
                raise InvalidRequest("messages", "the chat template wants roles to alternate")
        ids: list[int] = []
        for role, content in messages:
            ids += [CONTROL_IDS["<|role|>"], *self.encode(role, add_special_tokens=False)]
            ids += [*self.encode(content, add_special_tokens=False), CONTROL_IDS["<|end|>"]]
        return [*ids, CONTROL_IDS["<|role|>"]]
