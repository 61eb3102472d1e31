"""Answers of a real model, compared with those it gave while nothing was broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.client import Answer, AsyncGraphpoolClient, CallError, Choice, TokenLogprob
from tests.chaos.oracle import Outcome, Question, Record
from worker.request import FinishReason

REPLAYED = 4
"""So many tokens that had come already are a repetition; fewer may be the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealQuestion:
    """A request to a real model, whose answer is not known beforehand."""

    kind: str
    prompt: str | tuple[int, ...]
    sampling: Mapping[str, Any]

    @property
    def n(self) -> int:
        """Choices asked for."""
        number: int = self.sampling.get("n", 1)
        return number

    @property
    def shows_near_ties(self) -> bool:
        """Whether the log-probabilities of the answer say by how much a token was chosen."""
        return self.kind == "greedy" and self.sampling.get("logprobs", 0) >= 2


@dataclass(slots=True)
class ChoiceAnswer:
    """All that came of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None

    def take(self, choice: Choice) -> None:
        """The next piece."""
        self.tokens += choice.token_ids
        self.text += choice.text
        self.logprobs += choice.logprobs
        self.finish_reason = choice.finish_reason
        self.stopped_by = choice.stop_string or choice.stop_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an answer first differs from the undisturbed one."""

    choice: int
    place: int
    expected: int | None
    got: int | None
    """None: the answer had ended."""
    gap: float | None
    """How much likelier the expected token was, in nats; None if the two likeliest do not tell."""


@dataclass(slots=True)
class Transcript:
    """One answer as it came, and what was wrong with its messages."""

    question: RealQuestion
    choices: list[ChoiceAnswer]
    record: Record
    runner: str = ""
    divergences: list[Divergence] = field(default_factory=list)


async def watch(client: AsyncGraphpoolClient, question: RealQuestion, *, patience_s: float = 60.0) -> Transcript:
    """Ask, and read to the end, or until nothing has come for `patience_s`."""
    reader = _Reader(question)
    async with client.stream(question.prompt, **question.sampling) as stream:
        return await reader.read(stream, patience_s)


class _Reader:
    def __init__(self, question: RealQuestion) -> None:
        self._asked_s = self._last_s = time.monotonic()
        self._record = Record(question=Question(prompt=(), max_tokens=1))
        self._whole = Transcript(question, [ChoiceAnswer() for _ in range(question.n)], self._record)
        self._sequence = 0
        self._usage_tokens: int | None = None
        self._is_over = False

    async def read(self, stream: AsyncIterator[Answer], patience_s: float) -> Transcript:
        record = self._record
        try:
            while True:
                self._take(await asyncio.wait_for(anext(stream), patience_s))
        except StopAsyncIteration:
            record.outcome = Outcome.COMPLETE
            self._check_end()
        except CallError as error:
            record.outcome, record.error = Outcome.FAILED, error
        except TimeoutError:
            record.violations.append(f"nothing came for {patience_s} s")
        return self._whole

    def _take(self, piece: Answer) -> None:
        record = self._record
        self._note_time()
        if self._is_over:
            record.violations.append("a message after the last one")
        if piece.sequence != self._sequence:
            record.violations.append(f"message {piece.sequence} came where {self._sequence} was due")
        self._sequence = piece.sequence + 1
        for choice in piece.choices:
            if self._whole.choices[choice.index].finish_reason is not None:
                record.violations.append(f"choice {choice.index} goes on after its end")
            self._whole.choices[choice.index].take(choice)
            record.num_tokens += len(choice.token_ids)
        if piece.execution is not None:
            record.replicas, record.attempts = (piece.execution.replica,), piece.execution.attempts
            self._whole.runner = piece.execution.runner
        if piece.timings is not None:
            self._is_over = True
            self._usage_tokens = piece.usage.completion_tokens if piece.usage is not None else None

    def _check_end(self) -> None:
        record = self._record
        self._note_time()
        if not self._is_over:
            record.violations.append("an end without a last message")
        if self._usage_tokens != record.num_tokens:
            record.violations.append(f"usage counts {self._usage_tokens} tokens, {record.num_tokens} came")
        for index, choice in enumerate(self._whole.choices):
            if choice.finish_reason is None:
                record.violations.append(f"choice {index} has no finish reason")
            wants_logprobs = self._whole.question.sampling.get("logprobs") is not None
            if wants_logprobs and [entry.token_id for entry in choice.logprobs] != choice.tokens:
                record.violations.append(f"the logprobs of choice {index} are not those of its tokens")

    def _note_time(self) -> None:
        now_s = time.monotonic()
        if self._record.first_token_s is None:
            self._record.first_token_s = now_s - self._asked_s
        elif now_s - self._last_s > self._record.longest_gap_s:
            self._record.longest_gap_s, self._record.gap_began_s = now_s - self._last_s, self._last_s
        self._last_s = now_s


def compare(whole: Transcript, undisturbed: Sequence[ChoiceAnswer]) -> None:
    """Find where each choice leaves the undisturbed one; then nothing is counted yet."""
    for index, (expected, got) in enumerate(zip(undisturbed, whole.choices, strict=True)):
        place = _first_difference(expected.tokens, got.tokens)
        if place is not None:
            whole.divergences.append(_divergence(index, place, expected, got))


def hold_to(whole: Transcript, undisturbed: Sequence[ChoiceAnswer]) -> None:
    """Count in the record whatever is not as in the undisturbed answer: tokens, text, logprobs and end."""
    record = whole.record
    for one in whole.divergences:
        expected, got = undisturbed[one.choice].tokens, whole.choices[one.choice].tokens
        _count(record, expected, got, one.place)
        record.violations.append(f"choice {one.choice} is another from token {one.place} on")
    if whole.divergences:
        return
    for index, (right, had) in enumerate(zip(undisturbed, whole.choices, strict=True)):
        for name in ("text", "logprobs", "finish_reason", "stopped_by"):
            if getattr(right, name) != getattr(had, name):
                record.violations.append(f"{name} of choice {index}")


def _count(record: Record, expected: Sequence[int], got: Sequence[int], place: int) -> None:
    rest = list(got[place:])
    record.num_lost += max(len(expected) - len(got), 0)
    is_replay = len(rest) >= REPLAYED and any(
        rest[:REPLAYED] == list(expected[earlier : earlier + REPLAYED]) for earlier in range(place)
    )
    if is_replay:
        record.num_duplicated += len(rest)
    elif rest and place < len(expected):
        record.num_changed += len(rest)
    else:
        record.num_duplicated += len(rest)


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for place, (right, had) in enumerate(zip(expected, got, strict=False)):
        if right != had:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _divergence(index: int, place: int, expected: ChoiceAnswer, got: ChoiceAnswer) -> Divergence:
    right = expected.tokens[place] if place < len(expected.tokens) else None
    had = got.tokens[place] if place < len(got.tokens) else None
    gap = None
    if right is not None and place < len(expected.logprobs):
        likeliest = dict(expected.logprobs[place].top)
        if had in likeliest:
            gap = expected.logprobs[place].logprob - likeliest[had]
    return Divergence(choice=index, place=place, expected=right, got=had, gap=gap)
