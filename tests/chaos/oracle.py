"""What a client checks of every answer: the scripted engine makes the right one known beforehand."""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from cluster.client import Answer, AsyncAnswerStream, AsyncGraphpoolClient, CallError, Choice
from tests.fakes.script import ScriptText, script, script_text
from worker.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request and, by it, its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    n: int = 1
    temperature: float = 1.0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    text: str = ""
    """Sent instead of the ids, which are those of the text, or of a chat that says it."""
    is_chat: bool = False

    def expected(self, choice: int) -> tuple[int, ...]:
        """All tokens of one choice."""
        seed = 0 if self.temperature == 0 else self.seed
        tokens = script(self.prompt, seed, choice, self.max_tokens)
        stops = [place for place, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def sampling(self) -> dict[str, object]:
        """Keyword arguments for a client."""
        chosen: dict[str, object] = {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": self.temperature}
        if self.n > 1:
            chosen["n"] = self.n
        if self.logprobs is not None:
            chosen["logprobs"] = self.logprobs
        if self.stop_token_ids:
            chosen["stop_token_ids"] = self.stop_token_ids
        return chosen


def random_question(draw: random.Random, *, max_tokens: int = 80) -> Question:
    """Ids, a text or a chat; greedy or seeded, of one or several choices, with or without stops and logprobs."""
    text = "".join(chr(draw.randrange(97, 123)) for _ in range(draw.randint(3, 12)))
    is_chat, is_text = draw.choice(((False, False), (False, False), (False, True), (True, True)))
    return Question(
        prompt=_prompt(draw, text, is_chat=is_chat, is_text=is_text),
        text=text if is_text else "",
        is_chat=is_chat,
        max_tokens=draw.randint(1, max_tokens),
        seed=draw.randrange(2**31),
        n=draw.choice((1, 1, 1, 2, 4)),
        temperature=draw.choice((0.0, 1.0, 1.0)),
        logprobs=draw.choice((None, None, 2)),
        # One of the 95 tokens the script is made of: most answers meet it.
        stop_token_ids=draw.choice(((), (), (), (FIRST_TOKEN + draw.randrange(95),))),
    )


def _prompt(draw: random.Random, text: str, *, is_chat: bool, is_text: bool) -> tuple[int, ...]:
    if is_chat:
        return tuple(ScriptText().render_chat([("user", text)]))
    return tuple(ScriptText().encode(text)) if is_text else tuple(draw.randrange(3, 500) for _ in text)


FIRST_TOKEN = 35


def ask(client: AsyncGraphpoolClient, question: Question, *, timeout_s: float | None = None) -> AsyncAnswerStream:
    """The stream of its answer."""
    sampling: dict[str, Any] = question.sampling()
    if question.is_chat:
        return client.chat_stream([("user", question.text)], timeout_s=timeout_s, **sampling)
    return client.stream(question.text or question.prompt, timeout_s=timeout_s, **sampling)


class Outcome(enum.Enum):
    """How an answer ended for its client."""

    COMPLETE = "complete"
    FAILED = "failed"
    STUCK = "stuck"


@dataclass(slots=True, kw_only=True)
class Record:
    """What a client saw of one answer, and every invariant it broke."""

    question: Question
    outcome: Outcome = Outcome.STUCK
    error: CallError | None = None
    violations: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_lost: int = 0
    """Expected tokens that a complete answer does not have."""
    num_duplicated: int = 0
    num_changed: int = 0
    longest_gap_s: float = 0.0
    """Between two messages."""
    gap_began_s: float = 0.0
    """When the longest one began, on time.monotonic."""
    first_token_s: float | None = None
    replicas: tuple[str, ...] = ()
    attempts: int = 0

    @property
    def is_right(self) -> bool:
        """Complete, and nothing wrong with it."""
        return self.outcome is Outcome.COMPLETE and not self.violations


class Recorder:
    """Takes the pieces of one answer and compares them with what was expected."""

    def __init__(self, question: Question) -> None:
        self.record = Record(question=question)
        self._expected = [question.expected(index) for index in range(question.n)]
        self._tokens: list[list[int]] = [[] for _ in range(question.n)]
        self._texts = [""] * question.n
        self._reasons: list[FinishReason | None] = [None] * question.n
        self._sequence = 0
        self._is_over = False
        self._asked_s = self._last_s = time.monotonic()
        self._usage_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Received, over all choices."""
        return self.record.num_tokens

    def piece(self, piece: Answer) -> None:
        """The next message."""
        record = self.record
        self._note_time()
        if self._is_over:
            self._violated("a message after the last one")
        if piece.sequence != self._sequence:
            self._violated(f"message {piece.sequence} came where {self._sequence} was due")
        self._sequence = piece.sequence + 1
        for choice in piece.choices:
            self._choice(choice)
        if piece.execution is not None:
            record.replicas, record.attempts = (piece.execution.replica,), piece.execution.attempts
        if piece.timings is not None:
            self._is_over = True
            self._usage_tokens = piece.usage.completion_tokens if piece.usage is not None else None

    def completed(self) -> Record:
        """The stream ended OK."""
        self.record.outcome = Outcome.COMPLETE
        self._note_time()
        if not self._is_over:
            self._violated("an end without a last message")
        for index, expected in enumerate(self._expected):
            missing = len(expected) - len(self._tokens[index])
            if missing > 0:
                self.record.num_lost += missing
                self._violated(f"choice {index} has {len(self._tokens[index])} of {len(expected)} tokens")
            if self._reasons[index] is None:
                self._violated(f"choice {index} has no finish reason")
            if self._texts[index] != script_text(self._tokens[index]):
                self._violated(f"the text of choice {index} is not that of its tokens")
        if self._usage_tokens != self.record.num_tokens:
            self._violated(f"usage counts {self._usage_tokens} tokens, {self.record.num_tokens} came")
        return self.record

    def failed(self, error: CallError) -> Record:
        """The stream ended with a status."""
        self.record.outcome, self.record.error = Outcome.FAILED, error
        if self._is_over:
            self._violated("an error after the last message")
        return self.record

    def _choice(self, choice: Choice) -> None:
        index = choice.index
        if not 0 <= index < len(self._expected):
            self._violated(f"a choice {index}")
            return
        if self._reasons[index] is not None:
            self._violated(f"choice {index} goes on after its end")
        tokens, expected = self._tokens[index], self._expected[index]
        wants_logprobs = self.record.question.logprobs is not None
        if wants_logprobs and [entry.token_id for entry in choice.logprobs] != list(choice.token_ids):
            self._violated(f"the logprobs of choice {index} are not those of its tokens")
        place = len(tokens)
        due = expected[place : place + len(choice.token_ids)]
        if tuple(choice.token_ids) != due:
            self._classify(index, place, choice.token_ids)
        tokens.extend(choice.token_ids)
        self.record.num_tokens += len(choice.token_ids)
        self._texts[index] += choice.text
        self._reasons[index] = choice.finish_reason
        if choice.finish_reason is not None and len(tokens) < len(expected):
            self._violated(f"choice {index} ends after {len(tokens)} of {len(expected)} tokens")

    def _classify(self, index: int, place: int, got: tuple[int, ...]) -> None:
        expected = self._expected[index]
        if place + len(got) > len(expected):
            self.record.num_duplicated += place + len(got) - len(expected)
            self._violated(f"choice {index} has more than its {len(expected)} tokens")
        elif any(got == expected[earlier : earlier + len(got)] for earlier in range(place)):
            self.record.num_duplicated += len(got)
            self._violated(f"tokens of choice {index} before {place} came again")
        else:
            self.record.num_changed += len(got)
            self._violated(f"tokens of choice {index} from {place} on are not the expected ones")

    def _note_time(self) -> None:
        now_s = time.monotonic()
        if self.record.first_token_s is None:
            self.record.first_token_s = now_s - self._asked_s
        elif now_s - self._last_s > self.record.longest_gap_s:
            self.record.longest_gap_s, self.record.gap_began_s = now_s - self._last_s, self._last_s
        self._last_s = now_s

    def _violated(self, what: str) -> None:
        self.record.violations.append(what)


async def watch(question: Question, stream: AsyncIterator[Answer], *, patience_s: float = 60.0) -> Record:
    """Read one answer to its end, or until nothing has come for `patience_s`."""
    recorder = Recorder(question)
    try:
        while True:
            piece = await asyncio.wait_for(anext(stream), patience_s)
            recorder.piece(piece)
    except StopAsyncIteration:
        return recorder.completed()
    except CallError as error:
        return recorder.failed(error)
    except TimeoutError:
        recorder.record.violations.append(f"nothing came for {patience_s} s")
        return recorder.record
