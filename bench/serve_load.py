"""Requests at a steady rate, whether or not earlier ones have ended, each answer compared token by token with the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.client import AsyncGraphpoolClient
from cluster.client.errors import ResourceExhausted

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the tokens that follow it when nothing else runs."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class Record:
    """What became of one request. Times are of time.monotonic."""

    due_s: float
    arrived_s: list[float] = field(default_factory=list)
    """Of each message with tokens."""
    received: list[int] = field(default_factory=list)
    replicas: set[str] = field(default_factory=set)
    attempts: int = 1
    is_refused: bool = False
    problem: str = ""
    """The status that ended it, when it was not OK."""

    @property
    def longest_gap_s(self) -> float:
        """Between two of its messages."""
        return max(
            (after - before for before, after in zip(self.arrived_s, self.arrived_s[1:], strict=False)), default=0.0
        )


@dataclass(slots=True)
class Findings:
    """Of the requests that were due in some time."""

    records: list[Record] = field(default_factory=list)
    lost: int = 0
    """Ended by an error, or too short."""
    refused: int = 0
    """Not taken on, for there was too much to do."""
    duplicated: int = 0
    """Longer than asked for."""
    changed: int = 0
    """Of the right length, with other tokens."""
    problems: Counter[str] = field(default_factory=Counter)

    def take(self, record: Record, question: Question) -> None:
        """One more that has ended."""
        self.records.append(record)
        if record.problem:
            self.problems[record.problem] += 1
        expected = question.answer
        if record.is_refused:
            self.refused += 1
        elif record.problem or len(record.received) < len(expected):
            self.lost += 1
        elif len(record.received) > len(expected):
            self.duplicated += 1
        elif tuple(record.received) != expected:
            self.changed += 1

    @property
    def is_flawless(self) -> bool:
        """Whether every request got its whole answer, and nothing else."""
        return bool(self.records) and not (self.lost or self.duplicated or self.changed)

    @property
    def moved(self) -> list[Record]:
        """Those that more than one replica had."""
        return [record for record in self.records if record.attempts > 1]

    @property
    def stayed(self) -> list[Record]:
        """The others."""
        return [record for record in self.records if record.attempts == 1]

    @property
    def first_tokens_s(self) -> list[float]:
        """From the moment each request was due."""
        return [record.arrived_s[0] - record.due_s for record in self.records if record.arrived_s]


class Load:
    """One process of clients on one channel; `during` says what happened to the requests of a time."""

    def __init__(self, client: AsyncGraphpoolClient, questions: Sequence[Question], *, seed: int = 1) -> None:
        self._client = client
        self._questions = questions
        self._draw = random.Random(seed)
        self._rate_per_s = 0.0
        self._changed = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self._findings = Findings()
        self._pacing: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Requests without a whole answer."""
        return len(self._asking)

    def set_rate(self, rate_per_s: float) -> None:
        """Requests a second from now on, as a Poisson process; 0 = none."""
        self._rate_per_s = rate_per_s
        self._changed.set()
        if self._pacing is None:
            self._pacing = asyncio.create_task(self._pace())

    def cut(self) -> Findings:
        """Of all requests since the last cut. Those that still run are added as they end."""
        found, self._findings = self._findings, Findings()
        return found

    async def finish(self) -> Findings:
        """Ask nothing more, wait for every answer, and say what was found since the last cut."""
        self.set_rate(0.0)
        if self._asking:
            await asyncio.wait(self._asking, timeout=DEADLINE_S + 5)
        return self.cut()

    async def close(self) -> None:
        """End at once."""
        tasks = [*self._asking, *([self._pacing] if self._pacing else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    async def _pace(self) -> None:
        due_s = time.monotonic()
        while True:
            self._changed.clear()
            if not self._rate_per_s:
                await self._changed.wait()
                due_s = time.monotonic()
                continue
            due_s += self._draw.expovariate(self._rate_per_s)
            if (wait_s := due_s - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    # Not wait_for, which may lose a cancellation that comes with the event.
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                if self._changed.is_set():
                    due_s = time.monotonic()
                    continue
            task = asyncio.create_task(self._ask(self._draw.choice(self._questions), due_s))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, question: Question, due_s: float) -> None:
        findings, record = self._findings, Record(due_s)
        stream = self._client.stream(
            question.prompt, max_tokens=len(question.answer), temperature=0.0, ignore_eos=True, timeout_s=DEADLINE_S
        )
        try:
            async for piece in stream:
                if piece.token_ids:
                    record.arrived_s.append(time.monotonic())
                    record.received += piece.token_ids
                if piece.execution is not None:
                    record.attempts = piece.execution.attempts
                    record.replicas.add(piece.execution.replica)
        except ResourceExhausted as error:
            record.is_refused = not record.received
            record.problem = str(error)[:200]
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a lost answer and no end of the load
            record.problem = f"{type(error).__name__}: {error}"[:200]
        findings.take(record, question)
