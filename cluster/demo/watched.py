"""One streamed chat and what can be measured of it from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Unpack

from cluster.client import AsyncGraphpoolClient, CallError, SamplingOptions
from protos import generation_pb2


@dataclass(slots=True)
class WatchedChat:
    """A question, the answer so far, and when its pieces came. Times are on `time.monotonic`."""

    question: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_pieces: int = 0
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    execution: generation_pb2.Execution | None = None
    error: CallError | None = None
    is_over: bool = False

    async def stream(
        self,
        client: AsyncGraphpoolClient,
        on_piece: Callable[[WatchedChat], None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        """Ask, and take the answer as it comes. A failed call is kept as `error`."""
        self.started_s = time.monotonic()
        try:
            async with client.chat_stream([("user", self.question)], **sampling) as answer:
                async for piece in answer:
                    self._take(piece.text, piece.token_ids)
                    self.execution = piece.execution or self.execution
                    if on_piece is not None:
                        on_piece(self)
        except CallError as error:
            self.error = error
        finally:
            self.is_over = True

    @property
    def first_token_ms(self) -> float:
        """From the question to the first token."""
        return 1000 * (self.first_s - self.started_s)

    @property
    def tokens_per_s(self) -> float:
        """After the first token."""
        span_s = self.last_s - self.first_s
        return (len(self.token_ids) - 1) / span_s if span_s > 0 else 0.0

    def _take(self, text: str, token_ids: tuple[int, ...]) -> None:
        now_s = time.monotonic()
        if self.num_pieces:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s
        self.num_pieces += 1
        self.text += text
        self.token_ids += token_ids
