"""Clients of a soak: they come whether or not others have been answered, read fast or slowly, or go away half-way."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.client import AsyncAnswerStream, AsyncGraphpoolClient, CallError, ResourceExhausted
from tests.chaos.oracle import FIRST_TOKEN, Outcome, Question, Record, Recorder, ask

PATIENCE_S = 60.0
LENGTHS = ((8, 40), (40, 160), (160, 480))
SHARES = (6, 3, 1)
"""Most answers are short."""
SLOW_TOKENS = 200
"""Most of an answer that is read slowly: a router keeps 256 messages for a reader that is behind."""
NUM_DRAWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one client asks for, and how it reads."""

    question: Question
    leaves_after: int | None = None
    """Tokens after which it goes away; None = it stays to the end."""
    pause_s: float = 0.0
    """Between two messages it reads."""

    @property
    def num_steps(self) -> int:
        """Steps of an engine that it takes."""
        longest = max(len(self.question.expected(choice)) for choice in range(self.question.n))
        return longest if self.leaves_after is None else min(longest, max(self.leaves_after // self.question.n, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Of all clients."""

    leaving: float = 0.04
    """Part of them that goes away half-way."""
    slow: float = 0.03
    """Part of them that reads slowly."""
    pause_s: float = 0.25
    """Of those, between two messages."""


def visit(draw: random.Random, habits: Habits) -> Visit:
    """Short and long prompts and answers; greedy or seeded, one choice or two, with or without logprobs and a stop token."""
    kind = draw.random()
    is_leaving, is_slow = kind < habits.leaving, kind > 1 - habits.slow
    least, most = draw.choices(LENGTHS, SHARES)[0]
    length = SLOW_TOKENS if is_slow else draw.randint(least, most)
    question = Question(
        prompt=tuple(draw.randrange(3, 500) for _ in range(draw.choice((4, 8, 12, 16, 400)))),
        max_tokens=length,
        seed=draw.randrange(2**31),
        n=draw.choice((1, 1, 1, 2)),
        temperature=draw.choice((0.0, 1.0, 1.0)),
        logprobs=20 if is_slow else draw.choice((None, None, 2)),
        stop_token_ids=draw.choice(((), (), (), (FIRST_TOKEN + draw.randrange(95),))),
    )
    return Visit(
        question=question,
        leaves_after=draw.randrange(length) if is_leaving else None,
        pause_s=habits.pause_s if is_slow else 0.0,
    )


def mean_steps(habits: Habits) -> float:
    """Of a visit."""
    draw = random.Random(0)
    return sum(visit(draw, habits).num_steps for _ in range(NUM_DRAWN)) / NUM_DRAWN


@dataclass(slots=True, kw_only=True)
class Tally:
    """What all clients together saw."""

    asked: int = 0
    complete: int = 0
    left: int = 0
    """Went away half-way; what had come until then was right."""
    slow: int = 0
    """Of the complete ones, read slowly."""
    moved: int = 0
    """Took more than one replica."""
    tokens: int = 0
    """Compared."""
    refused: int = 0
    """Told to come back later before anything had come: more was asked for than the pool can give."""
    lost: int = 0
    """Answers that ended with another error, or did not go on, though their client stayed."""
    duplicated: int = 0
    changed: int = 0
    problems: list[str] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """Between two messages, of clients that read as fast as they can."""
    first_s: array[float] = field(default_factory=lambda: array("f"))
    """From asking to the first message."""
    moved_gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """The longest of each answer that was moved."""

    def take(self, one: Visit, record: Record, *, has_left: bool) -> None:
        """Count one answer."""
        is_refused = isinstance(record.error, ResourceExhausted) and not record.num_tokens
        self.left += has_left
        self.refused += is_refused
        self.complete += not has_left and record.outcome is Outcome.COMPLETE
        self.lost += not has_left and not is_refused and record.outcome is not Outcome.COMPLETE
        self.slow += bool(one.pause_s) and record.outcome is Outcome.COMPLETE
        self.tokens += record.num_tokens
        self.duplicated += record.num_duplicated
        self.changed += record.num_changed
        if record.attempts > 1:
            self.moved += 1
            if not one.pause_s:
                self.moved_gaps_s.append(record.longest_gap_s)
        if len(self.problems) < 20 and not is_refused:
            self.problems += [*record.violations[:3], *([str(record.error)] if record.error else [])]

    @property
    def is_flawless(self) -> bool:
        """Whether every answer was right, and whole unless its client left."""
        return not (self.lost or self.duplicated or self.changed or self.problems)


class SoakClients:
    """Arrive as a Poisson process does."""

    def __init__(self, client: AsyncGraphpoolClient, *, rate_per_s: float, habits: Habits, seed: int) -> None:
        self.tally = Tally()
        self._client = client
        self._rate_per_s = rate_per_s
        self._habits = habits
        self._draw = random.Random(seed)

    async def come(self, is_over: Callable[[], bool]) -> Tally:
        """Until then; returns when all have been answered. Raises what went wrong with a client itself."""
        due_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while not is_over():
                tasks.create_task(self._visit(visit(self._draw, self._habits)))
                due_s += self._draw.expovariate(self._rate_per_s)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return self.tally

    async def _visit(self, one: Visit) -> None:
        self.tally.asked += 1
        recorder, has_left = Recorder(one.question), False
        async with ask(self._client, one.question) as stream:
            try:
                has_left = await self._read(one, recorder, stream)
                if not has_left:
                    recorder.completed()
            except CallError as error:
                recorder.failed(error)
            except TimeoutError:
                recorder.record.violations.append(f"nothing came for {PATIENCE_S} s")
        self.tally.take(one, recorder.record, has_left=has_left)

    async def _read(self, one: Visit, recorder: Recorder, stream: AsyncAnswerStream) -> bool:
        """Whether the client left before the end."""
        last_s, times_s = time.monotonic(), self.tally.first_s
        while one.leaves_after is None or recorder.num_tokens < one.leaves_after:
            try:
                piece = await asyncio.wait_for(anext(stream), PATIENCE_S)
            except StopAsyncIteration:
                return False
            if not one.pause_s:
                times_s.append(time.monotonic() - last_s)
            last_s, times_s = time.monotonic(), self.tally.gaps_s
            recorder.piece(piece)
            if one.pause_s:
                await asyncio.sleep(one.pause_s)
        return True
