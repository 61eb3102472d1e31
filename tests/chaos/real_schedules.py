"""Random schedules of two faults at once in pools of processes. What happens comes from a seed; when exactly does not.

python -m tests.chaos.real_schedules --count 20 --first 1
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cluster.client import DeadlineExceeded, InternalError, ResourceExhausted
from tests.chaos.chaos_pool import ChaosPool, proxied_pool
from tests.chaos.oracle import Outcome, Question, Record, random_question

NUM_QUESTIONS = 24
NUM_REPLICAS = 4
STEP_S = 0.02
LONGEST_GAP_S = 8.0
"""Two silent replicas, found one after the other, on a busy machine."""


@dataclass(slots=True)
class RealSchedule:
    """One run."""

    pool: ChaosPool
    draw: random.Random
    faults: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    moved: int = 0
    longest_gap_s: float = 0.0
    dead: set[str] = field(default_factory=set)
    spoilt: set[tuple[int, ...]] = field(default_factory=set)
    beside: list[asyncio.Task[None]] = field(default_factory=list)

    def victim(self) -> str:
        return self.draw.choice(sorted(self.pool.replicas))

    async def run(self) -> None:
        questions = [random_question(self.draw, max_tokens=100) for _ in range(NUM_QUESTIONS)]
        asked = [asyncio.create_task(self._ask(question, self.draw.uniform(0, 1.5))) for question in questions]
        kinds = self.draw.sample(sorted(FAULTS), 2)
        first_s = self.draw.uniform(0.1, 1.0)
        await asyncio.gather(*(self._break(kind, first_s + self.draw.uniform(0, 0.2), questions) for kind in kinds))
        await asyncio.gather(*asked, *self.beside)
        await self._settle()

    def judge(self, record: Record, may_fail: tuple[type[Exception], ...] = ()) -> None:
        longest_s = max(record.longest_gap_s, record.first_token_s or 0.0)
        self.longest_gap_s = max(self.longest_gap_s, longest_s)
        self.moved += record.attempts > 1
        self.problems += record.violations
        if record.question.prompt in self.spoilt:
            may_fail = (*may_fail, InternalError)
        if record.outcome is Outcome.FAILED and not isinstance(record.error, may_fail):
            self.problems.append(str(record.error))
        if longest_s > LONGEST_GAP_S:
            self.problems.append(f"a gap of {longest_s:.1f} s")

    async def _ask(self, question: Question, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.judge(await self.pool.ask(question))

    async def _break(self, kind: str, after_s: float, questions: list[Question]) -> None:
        await asyncio.sleep(after_s)
        self.faults.append(await FAULTS[kind](self, questions))

    async def _settle(self) -> None:
        """What lives comes back, answers, and holds nothing any more."""
        for name, replica in self.pool.replicas.items():
            if replica.process.returncode is None:
                replica.send(signal.SIGCONT)
                self.pool.proxies[name].heal()
        try:
            await self.pool.wait_ready(NUM_REPLICAS - len(self.dead), timeout_s=20)
        except TimeoutError:
            states = {name: load.state for name, load in (await self.pool.loads()).items()}
            self.problems.append(f"{len(self.dead)} are dead, and the states are {states}")
        self.judge(await self.pool.ask(Question(prompt=(3, 4, 5), max_tokens=10)))
        await asyncio.sleep(0.6)
        left = {
            name: (load.router_streams, load.router_outstanding_tokens, load.load.running + load.load.waiting)
            for name, load in (await self.pool.loads()).items()
        }
        if any(any(counts) for counts in left.values()):
            self.problems.append(f"left: {left}")


async def _kill(schedule: RealSchedule, _: list[Question]) -> str:
    name = schedule.victim()
    schedule.dead.add(name)
    await schedule.pool.replicas[name].kill()
    return f"kill {name}"


async def _freeze(schedule: RealSchedule, _: list[Question]) -> str:
    name, duration_s = schedule.victim(), schedule.draw.uniform(0.5, 5)
    replica = schedule.pool.replicas[name]
    if replica.process.returncode is None:
        replica.send(signal.SIGSTOP)

    async def thaw() -> None:
        await asyncio.sleep(duration_s)
        if replica.process.returncode is None:
            replica.send(signal.SIGCONT)

    schedule.beside.append(asyncio.create_task(thaw()))
    return f"freeze {name} for {duration_s:.1f} s"


async def _hang(schedule: RealSchedule, _: list[Question]) -> str:
    name, kind = schedule.victim(), schedule.draw.choice(("hang_engine", "stall_mailbox"))
    schedule.dead.add(name)
    await schedule.pool.inject(name, **{kind: {"duration_s": 600.0}})
    # Only a step can hang: one is under way until the engine is found out.
    schedule.beside.append(asyncio.create_task(_end_of(schedule.pool, name)))
    return f"{kind} {name}"


async def _end_of(pool: ChaosPool, name: str) -> None:
    """Keep asking the whole pool, so that the hanging replica has work, until it has ended itself."""
    while pool.replicas[name].process.returncode is None:
        await asyncio.gather(*(pool.ask(Question(prompt=(9, number + 3), max_tokens=4)) for number in range(8)))
        await asyncio.sleep(0.1)


async def _cut(schedule: RealSchedule, _: list[Question]) -> str:
    name, duration_s = schedule.victim(), schedule.draw.uniform(0.5, 5)
    there, back = schedule.draw.choice(((True, True), (True, False), (False, True)))
    proxy = schedule.pool.proxies[name]
    proxy.blackhole(to_target=there, from_target=back)

    async def heal() -> None:
        await asyncio.sleep(duration_s)
        proxy.heal()

    schedule.beside.append(asyncio.create_task(heal()))
    return f"cut {name} there {there} back {back} for {duration_s:.1f} s"


async def _reset(schedule: RealSchedule, _: list[Question]) -> str:
    name = schedule.victim()
    schedule.pool.proxies[name].reset()
    return f"reset {name}"


async def _delay(schedule: RealSchedule, _: list[Question]) -> str:
    name = schedule.victim()
    schedule.pool.proxies[name].delay(0.2)
    return f"delay {name}"


async def _slow(schedule: RealSchedule, _: list[Question]) -> str:
    name = schedule.victim()
    await schedule.pool.inject(name, slow_steps={"factor": 5.0})
    return f"slow {name}"


async def _nan(schedule: RealSchedule, questions: list[Question]) -> str:
    question = schedule.draw.choice(questions)
    schedule.spoilt.add(question.prompt)
    fault = {"prompt_token_ids": question.prompt, "after_tokens": schedule.draw.randrange(20)}
    await asyncio.gather(*(schedule.pool.inject(name, nan_row=fault) for name in schedule.pool.replicas))
    return f"NaN in question {questions.index(question)}"


async def _hurry(schedule: RealSchedule, _: list[Question]) -> str:
    async def ask(question: Question, timeout_s: float) -> None:
        schedule.judge(await schedule.pool.ask(question, timeout_s=timeout_s), (DeadlineExceeded, ResourceExhausted))

    for _number in range(16):
        question, timeout_s = random_question(schedule.draw), schedule.draw.uniform(0.01, 0.4)
        schedule.beside.append(asyncio.create_task(ask(question, timeout_s)))
    return "16 short deadlines"


FAULTS: dict[str, Callable[[RealSchedule, list[Question]], Awaitable[str]]] = {
    "cut": _cut,
    "deadlines": _hurry,
    "delay": _delay,
    "freeze": _freeze,
    "hang": _hang,
    "kill": _kill,
    "nan": _nan,
    "reset": _reset,
    "slow": _slow,
}


async def run_real_schedule(seed: int) -> RealSchedule:
    """In a pool of its own."""
    async with proxied_pool(NUM_REPLICAS, step_s=STEP_S, stall_s=2.0) as pool:
        schedule = RealSchedule(pool, random.Random(seed))
        await schedule.run()
    return schedule


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    flawed = 0
    for seed in range(options.first, options.first + options.count):
        done = asyncio.run(run_real_schedule(seed))
        flawed += bool(done.problems)
        print(
            f"seed {seed}: {'; '.join(done.faults)}: {done.moved} moved, gap {done.longest_gap_s:.2f} s {done.problems[:3]}",
            flush=True,
        )
    print(f"{options.count} schedules, {flawed} broke an invariant")
    return int(flawed > 0)


if __name__ == "__main__":
    sys.exit(main())
