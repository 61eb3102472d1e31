"""What clients saw of an event in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from cluster.client import AsyncGraphpoolClient
from tests.chaos.oracle import FIRST_TOKEN, Outcome, Question, Record, ask, watch


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that happened to the cluster, and every answer that was running meanwhile or began in it."""

    name: str
    whole_s: float = 0.0
    """From its beginning until the pool was what it should be again."""
    answers: int = 0
    lost: int = 0
    """Answers that did not end OK."""
    duplicated: int = 0
    """Tokens that came twice."""
    changed: int = 0
    """Tokens that are not the expected ones."""
    moved: int = 0
    """Answers that took more than one replica."""
    longest_gap_s: float = 0.0
    """Longest wait between two messages of one answer."""
    problems: list[str] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Count one answer."""
        self.answers += 1
        self.lost += record.outcome is not Outcome.COMPLETE
        self.duplicated += record.num_duplicated
        self.changed += record.num_changed
        self.moved += record.attempts > 1
        self.longest_gap_s = max(self.longest_gap_s, record.longest_gap_s)
        self.problems += [*record.violations[:3], *([str(record.error)] if record.error else [])]

    @property
    def is_flawless(self) -> bool:
        """Whether every answer was whole and right."""
        return not (self.lost or self.duplicated or self.changed or self.problems)

    def line(self) -> str:
        """For a log."""
        return (
            f"{self.name}: whole after {self.whole_s:.1f} s; {self.answers} answers, {self.lost} lost, "
            f"{self.duplicated} tokens doubled, {self.changed} changed, {self.moved} answers moved, "
            f"longest gap {1000 * self.longest_gap_s:.0f} ms {self.problems[:3] or ''}"
        )


def together(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Events of the same name, in the order in which names came first."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.name, []).append(event)
    return found


def question(draw: random.Random, max_tokens: int) -> Question:
    """Ids; greedy or seeded, one choice or two, with or without logprobs and a stop token."""
    return Question(
        prompt=tuple(draw.randrange(3, 500) for _ in range(draw.randint(3, 12))),
        max_tokens=draw.randint(max_tokens // 4, max_tokens),
        seed=draw.randrange(2**31),
        n=draw.choice((1, 1, 1, 2)),
        temperature=draw.choice((0.0, 1.0, 1.0)),
        logprobs=draw.choice((None, None, 2)),
        stop_token_ids=draw.choice(((), (), (), (FIRST_TOKEN + draw.randrange(95),))),
    )


class ClusterLoad:
    """Clients that ask one question after the other and check every token, until there are to be fewer."""

    def __init__(self, client: AsyncGraphpoolClient, *, seed: int, max_tokens: int, patience_s: float = 60.0) -> None:
        self._client = client
        self._seed = seed
        self._max_tokens = max_tokens
        self._patience_s = patience_s
        self._wanted = 0
        self._number = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running: set[int] = set()
        self.between = self._event = Event(name="between events")

    def resize(self, num_clients: int) -> None:
        """So many from now on; those that are too many end with their answer."""
        self._wanted = num_clients
        for place in range(num_clients):
            task = self._tasks.get(place)
            if task is None or task.done():
                self._tasks[place] = asyncio.create_task(self._ask_on(place))

    async def end(self) -> None:
        """Wait for what is running; raises what went wrong with a client itself."""
        self._wanted = 0
        await asyncio.gather(*self._tasks.values())

    @contextlib.asynccontextmanager
    async def during(self, name: str) -> AsyncIterator[Event]:
        """An event that lasts for the block, which returns when the pool is whole; its answers are waited for."""
        event = self._event = Event(name=name)
        began_s = time.monotonic()
        try:
            yield event
            event.whole_s = time.monotonic() - began_s
            last = self._number
            while any(number <= last for number in self._running):  # noqa: ASYNC110  # of many tasks
                await asyncio.sleep(0.02)
        finally:
            self._event = self.between

    async def answer(self, draw: random.Random) -> Record:
        """Ask for something, and check what comes."""
        asked = question(draw, self._max_tokens)
        async with ask(self._client, asked) as stream:
            return await watch(asked, stream, patience_s=self._patience_s)

    async def _ask_on(self, place: int) -> None:
        while place < self._wanted:
            self._number += 1
            number = self._number
            self._running.add(number)
            try:
                record = await self.answer(random.Random(self._seed * 1_000_003 + number))
            finally:
                self._running.discard(number)
            self._event.take(record)
