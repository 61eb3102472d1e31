"""An open load of checked answers, each with the times of its messages, counted by the part of a run that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from cluster.client import Answer
from tests.chaos.campaign import percentile
from tests.chaos.oracle import Question, Record, watch

MIN_TOKENS, MAX_TOKENS = 20, 60

Streams = Callable[[Question, int], AbstractAsyncContextManager[AsyncIterator[Answer]]]
"""Opens the stream of the answer to a question, given its number."""


@dataclass(slots=True)
class Timed:
    """One answer, and when each message of it came."""

    record: Record
    came_s: list[float]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.came_s, self.came_s[1:], strict=False)]

    def met(self, replica: str) -> bool:
        """Whether it was placed again, or ended on that replica."""
        return self.record.attempts > 1 or replica in self.record.replicas


@dataclass(slots=True)
class Phase:
    """The answers of one part of the run."""

    name: str
    answers: list[Timed] = field(default_factory=list)
    num_faults: int = 0

    def without(self, replica: str) -> Phase:
        """Only the answers that had nothing to do with that replica."""
        return Phase(self.name, [one for one in self.answers if not one.met(replica)], self.num_faults)

    @property
    def num_wrong(self) -> int:
        return sum(not one.record.is_right for one in self.answers)

    def ttft_ms(self, share: float) -> float:
        """A quantile of the time to the first token."""
        return 1000 * percentile([one.record.first_token_s or 0.0 for one in self.answers], share)

    def token_ms(self, share: float) -> float:
        """A quantile of the time from one message to the next."""
        return 1000 * percentile([gap for one in self.answers for gap in one.gaps_s], share)


def together(phases: Sequence[Phase]) -> Phase:
    """All their answers."""
    return Phase(phases[0].name, [one for phase in phases for one in phase.answers])


class OpenLoad:
    """Poisson arrivals, whatever becomes of the answers."""

    def __init__(self, streams: Streams, rate_per_s: float, draw: random.Random) -> None:
        self._streams = streams
        self._rate_per_s = rate_per_s
        self._draw = draw
        self._phase = Phase("between")
        self._asking: set[asyncio.Task[None]] = set()
        self._num_asked = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Requests come for the length of the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def count(self, phase: Phase, seconds: float) -> Phase:
        """What arrives for so long belongs to the phase; returns once it has been answered."""
        self._phase = phase
        await asyncio.sleep(seconds)
        self._phase = Phase("between")
        await asyncio.gather(*tuple(self._asking))
        return phase

    async def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._num_asked += 1
            task = asyncio.create_task(self._ask(self._phase, self._num_asked))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            due_s += self._draw.expovariate(self._rate_per_s)

    async def _ask(self, phase: Phase, number: int) -> None:
        draw, came_s = self._draw, list[float]()
        prompt = tuple(draw.randrange(3, 500) for _ in range(6))
        question = Question(prompt=prompt, max_tokens=draw.randint(MIN_TOKENS, MAX_TOKENS), seed=draw.randrange(99))
        async with self._streams(question, number) as stream:
            record = await watch(question, _noted(stream, came_s))
        phase.answers.append(Timed(record, came_s))


async def _noted(stream: AsyncIterator[Answer], came_s: list[float]) -> AsyncIterator[Answer]:
    async for piece in stream:
        came_s.append(time.monotonic())
        yield piece
