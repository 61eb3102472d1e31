"""What streams notice of trouble on another replica: the same open load without faults, and while one replica is broken again and again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from bench.chaos_open_load import OpenLoad, Phase, together
from bench.chaos_results import Figure, add_figures, chaos_results
from bench.results_file import Results
from cluster.client import Answer
from protos import fault_pb2
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Question, ask
from tests.chaos.sim_pool import SimPool, sim_pool
from tests.chaos.virtual_time import run_virtual

STEP_S = 0.01
VICTIM = "r0"
SLOW_FACTOR = 5.0
DERATED = 2.5
AT_WORK_S = 3.0
"""Between the return of the broken replica and the next fault."""
SETTLING_S = 5.0
"""After a slow replica has been derated: its streams of before have ended."""
FAULTS = ("killed", "hung", "restarted")
ALL = "5x slower, all answers"
MAX_RATIO = {**dict.fromkeys(FAULTS, 1.10), ALL: 1.20}


class Stage(Protocol):
    """A pool of which one replica can be broken."""

    def stream(self, question: Question, number: int) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Answer]]:
        """Of the answer."""

    async def break_victim(self, how: str) -> None:
        """In one of the ways of FAULTS; returns when its successor is ready."""

    async def slow_down(self) -> None:
        """Make the victim's steps SLOW_FACTOR times longer."""

    async def slowness(self) -> float:
        """Of the victim, as the router sees it."""


class ProcessStage:
    """Processes and sockets."""

    def __init__(self, pool: ChaosPool) -> None:
        self._pool = pool

    @contextlib.asynccontextmanager
    async def stream(self, question: Question, number: int) -> AsyncIterator[AsyncIterator[Answer]]:  # noqa: ARG002
        """See Stage."""
        async with ask(self._pool.client, question) as stream:
            yield stream

    async def break_victim(self, how: str) -> None:
        """See Stage."""
        pool, victim = self._pool, self._pool.replicas[VICTIM]
        if how == "killed":
            await victim.kill()
        elif how == "hung":
            await pool.inject(VICTIM, hang_engine={"duration_s": 600.0})
        else:
            victim.send(signal.SIGTERM)
        await victim.process.wait()
        await pool.spawn(VICTIM)
        await pool.wait_ready(len(pool.replicas))

    async def slow_down(self) -> None:
        """See Stage."""
        await self._pool.inject(VICTIM, slow_steps=fault_pb2.SlowFault(factor=SLOW_FACTOR))

    async def slowness(self) -> float:
        """See Stage."""
        return (await self._pool.loads())[VICTIM].slowness


class VirtualStage:
    """One process on a virtual clock: nothing takes time but what is slept for."""

    def __init__(self, pool: SimPool) -> None:
        self._pool = pool

    @contextlib.asynccontextmanager
    async def stream(self, question: Question, number: int) -> AsyncIterator[AsyncIterator[Answer]]:
        """See Stage."""
        yield self._pool.stream(question, request_id=f"q{number}")

    async def break_victim(self, how: str) -> None:
        """See Stage."""
        victim = self._pool.replicas[0]
        engine = victim.engine
        if how == "killed":
            victim.kill()
        elif how == "hung":
            engine.knobs.is_hanging = True
        else:
            await victim.drain(10.0)
        while victim.engine is engine:  # noqa: ASYNC110  # a new process has no event
            await asyncio.sleep(0.02)
        await self._pool.router.wait_ready(len(self._pool.replicas), timeout_s=30.0)

    async def slow_down(self) -> None:
        """See Stage."""
        self._pool.replicas[0].engine.slowness = SLOW_FACTOR

    async def slowness(self) -> float:
        """See Stage."""
        return next(load.slowness for load in self._pool.router.pool.loads() if load.replica == VICTIM)


async def measure(stage: Stage, options: argparse.Namespace) -> list[Phase]:
    """Without faults, with each of them, without once more, and with a slow replica."""
    phases: list[Phase] = []
    load = OpenLoad(stage.stream, options.rate, random.Random(options.seed))
    async with load.running():
        await load.count(Phase("warm-up"), 2.0)
        phases.append(await load.count(Phase("no fault"), options.seconds))
        for name in FAULTS:
            phase = Phase(name)
            async with _broken(stage, phase):
                await load.count(phase, options.seconds)
            phases.append(phase)
        phases.append(await load.count(Phase("no fault again"), options.seconds))
        await stage.slow_down()
        async with asyncio.timeout(20.0):
            while await stage.slowness() < DERATED:  # noqa: ASYNC110  # the router has no event for its clients
                await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLING_S)
        phases.append(await load.count(Phase(ALL), options.seconds))
    return phases


@contextlib.asynccontextmanager
async def _broken(stage: Stage, phase: Phase) -> AsyncIterator[None]:
    """Again and again; at the end the pool is whole."""
    is_over = asyncio.Event()

    async def break_on() -> None:
        while not is_over.is_set():
            phase.num_faults += 1
            await stage.break_victim(phase.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), AT_WORK_S)

    task = asyncio.create_task(break_on())
    try:
        yield
    finally:
        is_over.set()
        await task


async def in_processes(options: argparse.Namespace) -> list[Phase]:
    """On the machine's own clock."""
    async with chaos_pool(options.replicas, step_s=STEP_S, stall_s=2.0) as pool:
        return await measure(ProcessStage(pool), options)


async def in_virtual_time(options: argparse.Namespace) -> list[Phase]:
    """Use it on a virtual loop."""
    async with sim_pool(options.replicas, step_s=STEP_S) as pool:
        return await measure(VirtualStage(pool), options)


def isolation(options: argparse.Namespace) -> Results:
    """What streams notice of trouble on another replica."""
    phases = run_virtual(lambda: in_virtual_time(options)) if options.virtual else asyncio.run(in_processes(options))
    num_wrong = sum(phase.num_wrong for phase in phases)
    name = "isolation_virtual" if options.virtual else "isolation"
    results = chaos_results(name, is_right=not num_wrong, seed=options.seed)
    missed: list[str] = []
    bases = [phase for phase in phases if phase.name.startswith("no fault")]
    for phase in phases:
        # Of a slow replica's own streams it is asked too; of a broken one's the campaigns of kills tell.
        sees_all = phase.name == ALL
        own = phase if sees_all else phase.without(VICTIM)
        base = together(bases if sees_all else [one.without(VICTIM) for one in bases])
        figures = figures_of(own, base)
        add_figures(results, figures, note=phase.name)
        print(f"{phase.name}: " + ", ".join(f"{metric} {value:.4g}" for metric, _, value in figures), flush=True)
        missed += _missed(phase.name, figures)
    results.correctness["goals_missed"] = missed
    print(f"goals missed: {missed or 'none'}")
    return results


def figures_of(phase: Phase, base: Phase) -> list[Figure]:
    """Of one part of the run, against the parts without faults."""
    ttft_ms, token_ms = phase.ttft_ms(0.99), phase.token_ms(0.99)
    return [
        ("faults", "faults", phase.num_faults),
        ("answers", "answers", len(phase.answers)),
        ("wrong", "answers", phase.num_wrong),
        ("first_token_p50_ms", "ms", phase.ttft_ms(0.5)),
        ("first_token_p99_ms", "ms", ttft_ms),
        ("token_p99_ms", "ms", token_ms),
        ("first_token_p99_ratio", "ratio", ttft_ms / base.ttft_ms(0.99)),
        ("token_p99_ratio", "ratio", token_ms / base.token_ms(0.99)),
    ]


def _missed(name: str, figures: Sequence[Figure]) -> list[str]:
    limit = MAX_RATIO.get(name)
    ratios = [(metric, value) for metric, unit, value in figures if unit == "ratio"]
    return [f"{name}: {metric} {value:.2f}" for metric, value in ratios if limit is not None and value > limit]
