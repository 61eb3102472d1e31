"""Kills replicas at random while thousands of answers are streamed, and checks every token of every answer.

    python -m tests.chaos.campaign --kills 200 --streams 20000 --seed 7

Everything drawn at random comes from the seed, which is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from protos import control_pb2
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Outcome, Record, random_question

STEP_S = 0.005
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign does."""

    kills: int
    streams: int
    seed: int
    replicas: int = 8
    concurrency: int = 256
    min_ready: int = 2
    """No kill while fewer are ready: what is tested is the loss of replicas, not of all of them."""
    outlasts_kills: bool = False
    """Whether there are as many more answers as it takes until the last kill."""
    limit_s: float = 3600.0
    """No kill is waited for any longer."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What came of it."""

    plan: Plan
    kills: int = 0
    complete: int = 0
    lost: int = 0
    """Answers that did not end OK."""
    stuck: int = 0
    own_deaths: int = 0
    """Replicas that ended without being killed."""
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    duplicated: int = 0
    """Tokens that came twice."""
    changed: int = 0
    """Tokens that are not the expected ones."""
    tokens: int = 0
    resumed: int = 0
    """Answers that took more than one placement."""
    violations: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Longest wait for a message in each answer that took more than one placement, its first message included."""
    other_gaps_s: list[float] = field(default_factory=list)
    """The same in all other answers."""
    duration_s: float = 0.0
    router_mib: tuple[float, float] = (0.0, 0.0)
    """Resident memory of the router after a tenth of the answers and at the end."""
    router_fds: tuple[int, int] = (0, 0)

    @property
    def is_flawless(self) -> bool:
        """Whether every answer was whole and right."""
        return not (self.lost or self.duplicated or self.changed or self.violations)

    def take(self, record: Record) -> None:
        """Count one answer."""
        self.tokens += record.num_tokens
        self.duplicated += record.num_duplicated
        self.changed += record.num_changed
        self.violations += [f"{record.question}: {violation}" for violation in record.violations[:3]]
        if record.outcome is Outcome.COMPLETE:
            self.complete += 1
            longest_s = max(record.longest_gap_s, record.first_token_s or 0.0)
            (self.gaps_s if record.attempts > 1 else self.other_gaps_s).append(longest_s)
            self.resumed += record.attempts > 1
        else:
            self.lost += 1
            self.stuck += record.outcome is Outcome.STUCK
            self.errors[str(record.error)[:100]] += 1

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.kills} of {self.plan.kills} kills, {self.complete} of {self.complete + self.lost} answers whole, {self.tokens} tokens, "
            f"{self.resumed} answers went on elsewhere, {self.duration_s:.0f} s",
            f"lost {self.lost} (stuck {self.stuck}), replicas that ended on their own {self.own_deaths}, duplicated tokens {self.duplicated}, changed tokens {self.changed}",
            f"gap of what went on elsewhere: {_percentiles(self.gaps_s)}; of the others: {_percentiles(self.other_gaps_s)}",
            f"router memory {self.router_mib[0]:.0f} -> {self.router_mib[1]:.0f} MiB, fds {self.router_fds[0]} -> {self.router_fds[1]}",
            *(f"{count} x {error}" for error, count in self.errors.most_common(5)),
            *self.violations[:10],
        ]


def percentile(values: Sequence[float], share: float) -> float:
    """0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def run(plan: Plan) -> Findings:
    """The whole campaign."""
    # On a machine with too much to do a step may take a while: here only kills are to end replicas.
    async with chaos_pool(plan.replicas, step_s=STEP_S, stall_s=30.0) as pool:
        return await Campaign(plan, pool).run()


class Campaign:
    """Askers, a killer, and what starts a successor of each replica that has ended."""

    def __init__(
        self, plan: Plan, pool: ChaosPool, ask: Callable[[random.Random], Awaitable[Record]] | None = None
    ) -> None:
        self.plan = plan
        self.pool = pool
        self.findings = Findings(plan=plan)
        self._ask = ask or self._ask_script
        self._numbers = self._count()
        self._started_s = time.monotonic()
        self._router = psutil.Process(pool.routers[0].pid)
        self._spawning: set[asyncio.Task[None]] = set()
        self._places: set[str] = set()
        """Where a new process is being started."""

    async def run(self) -> Findings:
        started_s = self._started_s = time.monotonic()
        askers = [asyncio.create_task(self._ask_on()) for _ in range(self.plan.concurrency)]
        killer = asyncio.create_task(self._kill_on())
        keeper = asyncio.create_task(self._replace_on())
        try:
            await asyncio.gather(*askers)
        finally:
            killer.cancel()
            keeper.cancel()
            await asyncio.gather(killer, keeper, *self._spawning, return_exceptions=True)
        findings = self.findings
        findings.duration_s = time.monotonic() - started_s
        findings.router_mib = (findings.router_mib[0], self._router.memory_info().rss / 2**20)
        findings.router_fds = (findings.router_fds[0], self._router.num_fds())
        return findings

    async def _ask_on(self) -> None:
        for number in self._numbers:
            draw = random.Random(self.plan.seed * 1_000_003 + number)
            self.findings.take(await self._ask(draw))

    async def _ask_script(self, draw: random.Random) -> Record:
        return await self.pool.ask(random_question(draw), patience_s=PATIENCE_S)

    def _count(self) -> Iterator[int]:
        number = 0
        while number < self.plan.streams or self._waits_for_kills():
            yield number
            number += 1

    def _waits_for_kills(self) -> bool:
        is_late = time.monotonic() - self._started_s > self.plan.limit_s
        return self.plan.outlasts_kills and self.findings.kills < self.plan.kills and not is_late

    async def _kill_on(self) -> None:
        """A kill each time so many more answers have ended; at random moments in between."""
        draw = random.Random(self.plan.seed)
        findings, share = self.findings, self.plan.streams / (self.plan.kills + 1)
        for number in range(1, self.plan.kills + 1):
            while findings.complete + findings.lost < number * share:  # noqa: ASYNC110  # thousands of changes
                await asyncio.sleep(0.01)
            if number == 1 + self.plan.kills // 10:
                findings.router_mib = (self._router.memory_info().rss / 2**20, 0.0)
                findings.router_fds = (self._router.num_fds(), 0)
            await asyncio.sleep(draw.uniform(0, 0.05))
            name = await self._victim(draw)
            await self.pool.replicas[name].kill()
            findings.kills += 1

    async def _replace_on(self) -> None:
        """A new process for each that has ended, by a kill or on its own."""
        while True:
            for name, replica in tuple(self.pool.replicas.items()):
                if replica.process.returncode is not None and name not in self._places:
                    self.findings.own_deaths += replica.process.returncode != -signal.SIGKILL
                    self._places.add(name)
                    self._spawning.add(asyncio.create_task(self._spawn(name)))
            await asyncio.sleep(0.05)

    async def _spawn(self, name: str) -> None:
        try:
            await self.pool.spawn(name)
        finally:
            self._places.discard(name)

    async def _victim(self, draw: random.Random) -> str:
        while True:
            loads = await self.pool.loads()
            ready = sorted(name for name, load in loads.items() if load.state == control_pb2.REPLICA_STATE_READY)
            alive = [name for name in ready if self.pool.replicas[name].process.returncode is None]
            if len(alive) >= self.plan.min_ready:
                return draw.choice(alive)
            await asyncio.sleep(0.05)


def _percentiles(gaps_s: Sequence[float]) -> str:
    if not gaps_s:
        return "none"
    shares = ", ".join(f"p{round(100 * share)} {1000 * percentile(gaps_s, share):.0f}" for share in (0.5, 0.9, 0.99))
    return f"mean {1000 * statistics.fmean(gaps_s):.0f}, {shares}, max {1000 * max(gaps_s):.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    findings = asyncio.run(run(Plan(**vars(options))))
    print("\n".join(findings.lines()))
    return int(not findings.is_flawless)


if __name__ == "__main__":
    sys.exit(main())
