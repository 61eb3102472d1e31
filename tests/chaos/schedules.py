"""Random schedules of two faults at once, on a virtual clock. Each comes from its seed alone.

python -m tests.chaos.schedules --count 500 --first 1     # a line for each schedule that broke an invariant
python -m tests.chaos.schedules --seed 17                 # one of them, told in full
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from cluster.client import CallError, DeadlineExceeded, InternalError, ResourceExhausted
from tests.chaos.oracle import Outcome, Question, Record, random_question
from tests.chaos.sim_pool import SimReplica, sim_pool
from tests.chaos.virtual_time import run_virtual
from worker.faults import PromptFault

NUM_QUESTIONS = 24
ASKED_WITHIN_S = 2.5
LONGEST_GAP_S = 6.0
"""Twice what finding one silent replica takes: two may be lost one after the other."""
SETTLED_S = 60.0


@dataclass(slots=True, kw_only=True)
class Report:
    """What one schedule did and what it broke."""

    seed: int
    faults: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    resumed: int = 0
    digest: str = ""
    """Of everything every client saw: equal for equal seeds."""


class Schedule:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        random.seed(seed)  # of the routers' jitter
        self.report = Report(seed=seed)
        self.questions = [random_question(self.draw) for _ in range(NUM_QUESTIONS)]
        self.starts_s = [self.draw.uniform(0, ASKED_WITHIN_S) for _ in range(NUM_QUESTIONS)]
        self.kinds = self.draw.sample(sorted(FAULTS), 2)
        self.spoilt: set[tuple[int, ...]] = set()
        """Prompts of which a row becomes NaN."""
        self._others: list[asyncio.Task[None]] = []
        self._seen: list[str] = []

    async def run(self) -> Report:
        async with sim_pool(self.draw.randint(3, 5)) as pool:
            self.pool = pool
            asked = [asyncio.create_task(self._ask(number)) for number in range(NUM_QUESTIONS)]
            first_s = self.draw.uniform(0, ASKED_WITHIN_S)
            faults = [asyncio.create_task(self._break(kind, first_s)) for kind in self.kinds]
            await asyncio.gather(*asked, *faults)
            await asyncio.gather(*self._others)
            await self._settle()
        self.report.digest = hashlib.sha256("\n".join(self._seen).encode()).hexdigest()[:16]
        return self.report

    def victim(self) -> SimReplica:
        return self.draw.choice(self.pool.replicas)

    def beside(self, work: Awaitable[None]) -> None:
        """Goes on beside the questions; the schedule waits for it."""
        self._others.append(asyncio.ensure_future(work))

    def broken(self, what: str) -> None:
        self.report.problems.append(what)

    async def _break(self, kind: str, first_s: float) -> None:
        """The two begin within a moment of each other."""
        await asyncio.sleep(first_s + self.draw.uniform(0, 0.3))
        self.report.faults.append(await FAULTS[kind](self))

    async def _ask(self, number: int) -> None:
        question = self.questions[number]
        await asyncio.sleep(self.starts_s[number])
        record = await self.pool.ask(question, request_id=f"q{number}")
        self.judge(f"q{number}", record)

    def judge(self, name: str, record: Record, *, may_fail: tuple[type[CallError], ...] = ()) -> None:
        """An answer must be whole and right, or have failed as it may."""
        self._seen.append(f"{name} {record.outcome} {record.num_tokens} {record.longest_gap_s:.4f} {record.replicas}")
        longest_s = max(record.longest_gap_s, record.first_token_s or 0.0)
        self.report.longest_gap_s = max(self.report.longest_gap_s, longest_s)
        self.report.resumed += record.attempts > 1
        for violation in record.violations:
            self.broken(f"{name}: {violation}")
        if record.question.prompt in self.spoilt:
            may_fail = (*may_fail, InternalError)
        if record.outcome is Outcome.FAILED and not isinstance(record.error, may_fail):
            self.broken(f"{name}: {record.error}")
        if longest_s > LONGEST_GAP_S:
            self.broken(f"{name}: a gap of {longest_s:.1f} s")

    async def _settle(self) -> None:
        """Everything is over: the pool is whole again, and nothing is left of any request."""
        for replica in self.pool.replicas:
            replica.thaw()
            replica.engine.slowness = 1.0
        try:
            await self.pool.router.wait_ready(len(self.pool.replicas), timeout_s=SETTLED_S)
        except TimeoutError:
            self.broken(f"not all replicas came back: {self._states()}")
        last = await self.pool.ask(Question(prompt=(3, 4, 5), max_tokens=20), request_id="last")
        self.judge("last", last)
        await asyncio.sleep(2.0)
        if self.pool.router.pool.num_live:
            self.broken(f"{self.pool.router.pool.num_live} requests still live in the router")
        for load in self.pool.router.pool.loads():
            if load.router_outstanding_tokens or load.router_streams:
                self.broken(
                    f"{load.replica} has {load.router_outstanding_tokens} tokens, {load.router_streams} streams left"
                )
        for replica in self.pool.replicas:
            left = replica.engine.load()
            if left.running or left.waiting or replica.server.num_live:
                self.broken(
                    f"{replica.name} still runs {left.running} + {left.waiting}, {replica.server.num_live} live"
                )

    def _states(self) -> dict[str, int]:
        return {load.replica: load.state for load in self.pool.router.pool.loads()}


async def _kill(schedule: Schedule) -> str:
    replica = schedule.victim()
    replica.kill()
    return f"kill {replica.name}"


async def _freeze(schedule: Schedule) -> str:
    replica, duration_s = schedule.victim(), schedule.draw.uniform(0.5, 8)
    replica.freeze()
    schedule.beside(_later(duration_s, replica.thaw))
    return f"freeze {replica.name} for {duration_s:.1f} s"


async def _partition(schedule: Schedule) -> str:
    replica, duration_s = schedule.victim(), schedule.draw.uniform(0.5, 8)
    inward, outward = schedule.draw.choice(((True, True), (True, False), (False, True)))
    replica.cut(inward=inward, outward=outward)
    schedule.beside(_later(duration_s, replica.mend))
    return f"cut {replica.name} inward {inward} outward {outward} for {duration_s:.1f} s"


async def _nan(schedule: Schedule) -> str:
    question = schedule.draw.choice(schedule.questions)
    schedule.spoilt.add(question.prompt)
    fault = PromptFault("nan", question.prompt, after_tokens=schedule.draw.randrange(20))
    for replica in schedule.pool.replicas:
        replica.engine.faults.on_prompt(replace(fault))
    return f"NaN after {fault.after_tokens} tokens of q{schedule.questions.index(question)}"


async def _slow(schedule: Schedule) -> str:
    replica = schedule.victim()
    replica.engine.slowness = 5.0
    return f"{replica.name} five times slower"


async def _hang(schedule: Schedule) -> str:
    replica = schedule.victim()
    replica.engine.knobs.is_hanging = True
    return f"engine of {replica.name} hangs"


async def _crash(schedule: Schedule) -> str:
    question = schedule.draw.choice(schedule.questions)
    fault = PromptFault("crash", question.prompt, after_tokens=schedule.draw.randrange(40), times_left=1)
    replica = schedule.victim()
    replica.engine.faults.on_prompt(fault)
    return f"engine of {replica.name} crashes in q{schedule.questions.index(question)} at {fault.after_tokens}"


async def _slow_consumer(schedule: Schedule) -> str:
    question = replace(random_question(schedule.draw), max_tokens=80)

    async def read() -> None:
        stream = schedule.pool.stream(question, request_id="slow-consumer")
        try:
            async for _ in stream:
                await asyncio.sleep(0.3)
        except CallError as error:
            if not isinstance(error, ResourceExhausted):
                schedule.broken(f"slow consumer: {error}")

    schedule.beside(read())
    return "a slow consumer"


async def _deadlines(schedule: Schedule) -> str:
    async def ask(number: int, question: Question, timeout_s: float) -> None:
        name = f"hurry{number}"
        record = await schedule.pool.ask(question, request_id=name, timeout_s=timeout_s)
        schedule.judge(name, record, may_fail=(DeadlineExceeded, ResourceExhausted))

    for number in range(16):
        schedule.beside(ask(number, random_question(schedule.draw), schedule.draw.uniform(0.01, 0.4)))
    return "16 short deadlines"


async def _cancels(schedule: Schedule) -> str:
    async def leave(number: int, question: Question, after_s: float) -> None:
        stream = schedule.pool.stream(question, request_id=f"leaver{number}")
        try:
            async with asyncio.timeout(after_s):
                async for _ in stream:
                    pass
        except TimeoutError:
            stream.cancel()
        except CallError as error:
            schedule.broken(f"leaver{number}: {error}")

    for number in range(16):
        schedule.beside(leave(number, random_question(schedule.draw), schedule.draw.uniform(0, 1)))
    return "16 clients leave"


async def _drain(schedule: Schedule) -> str:
    replica, grace_s = schedule.victim(), schedule.draw.uniform(0.1, 5)
    schedule.beside(replica.drain(grace_s))
    return f"drain {replica.name} within {grace_s:.1f} s"


async def _later(delay_s: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(delay_s)
    act()


FAULTS: dict[str, Callable[[Schedule], Awaitable[str]]] = {
    "cancels": _cancels,
    "crash": _crash,
    "deadlines": _deadlines,
    "drain": _drain,
    "freeze": _freeze,
    "hang": _hang,
    "kill": _kill,
    "nan": _nan,
    "partition": _partition,
    "slow": _slow,
    "slow consumer": _slow_consumer,
}


def run_schedule(seed: int) -> Report:
    """Everything about it follows from `seed`."""
    return run_virtual(lambda: Schedule(seed).run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.count)
    started_s, reports = time.perf_counter(), []
    for seed in seeds:
        report = run_schedule(seed)
        reports.append(report)
        if report.problems or options.seed is not None:
            print(f"seed {seed}: {'; '.join(report.faults)}: {report.problems[:3]}", flush=True)
    flawed = sum(bool(report.problems) for report in reports)
    resumed, gap_s = sum(report.resumed for report in reports), max(report.longest_gap_s for report in reports)
    print(
        f"{len(reports)} schedules from seed {seeds[0]} on, {flawed} broke an invariant; {resumed} answers went on "
        f"elsewhere, longest gap {gap_s:.2f} s, {time.perf_counter() - started_s:.0f} s"
    )
    return int(flawed > 0)


if __name__ == "__main__":
    sys.exit(main())
