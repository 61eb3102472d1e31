"""What streams notice of trouble on another replica: the same open load without faults, and while one replica is broken again and again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.chaos_results import Figure, add_figures, chaos_results
from bench.results_file import Results
from cluster.client import Answer
from protos import control_pb2, fault_pb2
from tests.chaos.campaign import percentile
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Question, Record, ask, watch

STEP_S = 0.01
MIN_TOKENS, MAX_TOKENS = 20, 60
VICTIM = "r0"
SLOW_FACTOR = 5.0
DERATED = 2.5
AT_WORK_S = 2.0
SETTLING_S = 5.0
"""After a slow replica has been derated: its streams of before have ended."""
MAX_RATIO = {"killed": 1.10, "hung": 1.10, "restarted": 1.10, f"{SLOW_FACTOR:g}x slower, all answers": 1.20}


@dataclass(slots=True)
class Timed:
    """One answer, and when each message of it came."""

    sent_s: float
    record: Record
    came_s: list[float]

    @property
    def is_bystander(self) -> bool:
        """Whether only replicas that nothing happened to had part in it."""
        return self.record.attempts <= 1 and VICTIM not in self.record.replicas

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.came_s, self.came_s[1:], strict=False)]


@dataclass(slots=True)
class Phase:
    """The answers of one part of the run."""

    name: str
    answers: list[Timed] = field(default_factory=list)
    num_faults: int = 0

    def of(self, *, bystanders: bool) -> list[Timed]:
        return [one for one in self.answers if one.is_bystander] if bystanders else self.answers

    def ttft_ms(self, share: float, *, bystanders: bool) -> float:
        first_s = [one.record.first_token_s or 0.0 for one in self.of(bystanders=bystanders)]
        return 1000 * percentile(first_s, share)

    def token_ms(self, share: float, *, bystanders: bool) -> float:
        return 1000 * percentile([gap for one in self.of(bystanders=bystanders) for gap in one.gaps_s], share)


class Load:
    """Poisson arrivals, whatever becomes of the answers."""

    def __init__(self, pool: ChaosPool, rate_per_s: float, draw: random.Random) -> None:
        self._pool = pool
        self._rate_per_s = rate_per_s
        self._draw = draw
        self._phase = Phase("warm-up")
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        due_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self._ask(self._phase))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            due_s += self._draw.expovariate(self._rate_per_s)

    async def count(self, phase: Phase, seconds: float) -> Phase:
        """What arrives for so long belongs to the phase; returns once it has been answered."""
        self._phase = phase
        await asyncio.sleep(seconds)
        self._phase = Phase("between")
        await asyncio.gather(*tuple(self._asking))
        return phase

    async def _ask(self, phase: Phase) -> None:
        draw = self._draw
        prompt = tuple(draw.randrange(3, 500) for _ in range(6))
        question = Question(prompt=prompt, max_tokens=draw.randint(MIN_TOKENS, MAX_TOKENS), seed=draw.randrange(99))
        timed = Timed(time.monotonic(), Record(question=question), [])
        async with ask(self._pool.client, question) as stream:
            timed.record = await watch(question, _noted(stream, timed.came_s))
        phase.answers.append(timed)


async def _noted(stream: AsyncIterator[Answer], came_s: list[float]) -> AsyncIterator[Answer]:
    async for piece in stream:
        came_s.append(time.monotonic())
        yield piece


async def _kill(pool: ChaosPool) -> None:
    await pool.replicas[VICTIM].kill()
    await pool.spawn(VICTIM)


async def _hang(pool: ChaosPool) -> None:
    await pool.inject(VICTIM, hang_engine={"duration_s": 600.0})
    await pool.replicas[VICTIM].process.wait()
    await pool.spawn(VICTIM)


async def _restart(pool: ChaosPool) -> None:
    pool.replicas[VICTIM].send(signal.SIGTERM)
    await pool.replicas[VICTIM].process.wait()
    await pool.spawn(VICTIM)


FAULTS: dict[str, Callable[[ChaosPool], Awaitable[None]]] = {"killed": _kill, "hung": _hang, "restarted": _restart}


@contextlib.asynccontextmanager
async def _broken(pool: ChaosPool, phase: Phase, fault: Callable[[ChaosPool], Awaitable[None]]) -> AsyncIterator[None]:
    """Again and again, once the victim's successor has been at work for a while; at the end the pool is whole."""
    is_over = asyncio.Event()

    async def break_on() -> None:
        while not is_over.is_set():
            await fault(pool)
            phase.num_faults += 1
            await pool.wait_ready(len(pool.replicas))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), AT_WORK_S)

    task = asyncio.create_task(break_on())
    try:
        yield
    finally:
        is_over.set()
        await task


@contextlib.asynccontextmanager
async def _under(load: Load) -> AsyncIterator[None]:
    task = asyncio.create_task(load.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def measure(options: argparse.Namespace) -> list[Phase]:
    """Without faults, with each of them, without once more, and with a slow replica."""
    draw = random.Random(options.seed)
    phases: list[Phase] = []
    async with chaos_pool(options.replicas, step_s=STEP_S, stall_s=2.0) as pool:
        load = Load(pool, options.rate, draw)
        async with _under(load):
            await load.count(Phase("warm-up"), 2.0)
            phases.append(await load.count(Phase("no fault"), options.seconds))
            for name, fault in FAULTS.items():
                phase = Phase(name)
                async with _broken(pool, phase, fault):
                    await load.count(phase, options.seconds)
                phases.append(phase)
            phases.append(await load.count(Phase("no fault again"), options.seconds))
            await _slow_down(pool)
            phases.append(await load.count(Phase(f"{SLOW_FACTOR:g}x slower"), options.seconds))
    return phases


async def _slow_down(pool: ChaosPool) -> None:
    await pool.inject(VICTIM, slow_steps=fault_pb2.SlowFault(factor=SLOW_FACTOR))
    async with asyncio.timeout(20.0):
        while (await pool.loads())[VICTIM].slowness < DERATED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLING_S)
    assert (await pool.loads())[VICTIM].state == control_pb2.REPLICA_STATE_READY


def isolation(options: argparse.Namespace) -> Results:
    """What streams notice of trouble on another replica."""
    phases = asyncio.run(measure(options))
    bases = [phase for phase in phases if phase.name.startswith("no fault")]
    lines = [*((phase.name, phase, True) for phase in phases)]
    lines.append((f"{phases[-1].name}, all answers", phases[-1], False))
    wrong = [one.record for phase in phases for one in phase.answers if not one.record.is_right]
    results = chaos_results("isolation", is_right=not wrong, seed=options.seed)
    results.correctness["violations"] = [text for record in wrong for text in record.violations][:20]
    missed: list[str] = []
    for name, phase, bystanders in lines:
        figures = _figures(phase, bases, bystanders=bystanders)
        add_figures(results, figures, note=name)
        print(f"{name}: " + ", ".join(f"{metric} {value:.4g}" for metric, _, value in figures), flush=True)
        ratios = {metric: value for metric, unit, value in figures if unit == "ratio"}
        missed += [
            f"{name}: {metric} {value:.2f}" for metric, value in ratios.items() if value > MAX_RATIO.get(name, 99.0)
        ]
    results.correctness["goals_missed"] = missed
    print(f"goals missed: {missed or 'none'}")
    return results


def _figures(phase: Phase, bases: Sequence[Phase], *, bystanders: bool) -> list[Figure]:
    """`bystanders`: only of answers in which the broken replica had no part."""
    base = Phase("bases", [one for part in bases for one in part.answers])
    answers = phase.of(bystanders=bystanders)
    ttft_ms, token_ms = (of(0.99, bystanders=bystanders) for of in (phase.ttft_ms, phase.token_ms))
    return [
        ("faults", "faults", phase.num_faults),
        ("answers", "answers", len(answers)),
        ("wrong", "answers", sum(not one.record.is_right for one in answers)),
        ("first_token_p50_ms", "ms", phase.ttft_ms(0.5, bystanders=bystanders)),
        ("first_token_p99_ms", "ms", ttft_ms),
        ("token_p99_ms", "ms", token_ms),
        ("first_token_p99_ratio", "ratio", ttft_ms / base.ttft_ms(0.99, bystanders=bystanders)),
        ("token_p99_ratio", "ratio", token_ms / base.token_ms(0.99, bystanders=bystanders)),
    ]
