"""How a pool grows: tokens a second and time to first token with 1, 2 and 4 replicas behind one router.

    python -m bench.pool                                                          # for a machine of 16 cores
    python -m bench.pool --rows 16 --step-ms 40 --clients 1 --seconds 15          # for two

Replicas are processes with scripted engines of a known capacity (rows / step), so that what is measured is the way to them.
Requests arrive as a Poisson process does, at a share of the capacity of all replicas. Every token of every answer is compared
with the script. Writes `bench/results/pool.json`; exits with 1 if an answer was wrong, or was not given.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import psutil

from bench.options import add_plan_options, bench_parser
from bench.pool_clients import Offer, Seen, drive, warm
from bench.results_file import Results, cpu_name
from tests.chaos.chaos_pool import ChaosPool, chaos_pool

WARM_UP_S = 2.0
MAX_WAITING = 100_000
"""Nothing is refused: what is too much shows in the time to first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is offered to how much."""

    replicas: tuple[int, ...] = (1, 2, 4)
    rows: int = 32
    step_ms: float = 10.0
    tokens: int = 64
    """Of each answer."""
    occupancy: float = 0.7
    """Part of the capacity that is asked for."""
    clients: int = 4
    """Processes that ask."""
    seconds: float = 20.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "step_ms", "tokens", "clients", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if not self.replicas or min(self.replicas) < 1:
            raise ValueError(f"replicas is {self.replicas}, must be numbers of at least 1")
        if not 0 < self.occupancy <= 1:
            raise ValueError(f"occupancy is {self.occupancy}, must be in (0, 1]")

    @property
    def replica_tokens_per_s(self) -> float:
        """What one replica can give."""
        return 1000 * self.rows / self.step_ms

    def rate_per_s(self, replicas: int) -> float:
        """Requests offered to so many."""
        return self.occupancy * replicas * self.replica_tokens_per_s / self.tokens


@dataclass(slots=True, kw_only=True)
class Point:
    """What one size of the pool gave."""

    replicas: int
    seen: Seen
    seconds: float
    """That were counted."""
    router_cpu_s: float
    busy: float
    """Part of all cores of the machine that was in use, by whatever."""

    asked_tokens: int
    """Of the requests that were due while it counted."""

    @property
    def asked_per_s(self) -> float:
        """In tokens."""
        return self.asked_tokens / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.seen.tokens / self.seconds

    @property
    def router_share(self) -> float:
        """Of one core."""
        return self.router_cpu_s / self.seconds

    @property
    def tokens_per_s_per_core(self) -> float:
        """What a core that had nothing else to do could carry."""
        return self.seen.tokens / self.router_cpu_s if self.router_cpu_s else 0.0


async def measure_point(plan: Plan, replicas: int) -> Point:
    """A fresh pool of that size under its load."""
    step_s = plan.step_ms / 1000
    async with chaos_pool(replicas, step_s=step_s, max_rows=plan.rows, max_waiting=MAX_WAITING) as pool:
        return await _under_load(plan, replicas, pool)


async def _under_load(plan: Plan, replicas: int, pool: ChaosPool) -> Point:
    loop = asyncio.get_running_loop()
    router = psutil.Process(pool.routers[0].pid)
    with ProcessPoolExecutor(plan.clients, mp_context=multiprocessing.get_context("spawn")) as processes:
        await asyncio.gather(*(loop.run_in_executor(processes, warm, number) for number in range(plan.clients)))
        begin_s = time.monotonic() + 0.5
        count_from_s, end_s = begin_s + WARM_UP_S, begin_s + WARM_UP_S + plan.seconds
        offer = functools.partial(
            Offer,
            address=pool.routers[0].address,
            rate_per_s=plan.rate_per_s(replicas) / plan.clients,
            begin_s=begin_s,
            count_from_s=count_from_s,
            end_s=end_s,
            num_tokens=plan.tokens,
        )
        offers = [offer(seed=plan.seed + number) for number in range(plan.clients)]
        driven = [loop.run_in_executor(processes, drive, one) for one in offers]
        await asyncio.sleep(count_from_s - time.monotonic())
        cpu_s, _ = processor_s(router), psutil.cpu_percent()
        await asyncio.sleep(end_s - time.monotonic())
        cpu_s, busy = processor_s(router) - cpu_s, psutil.cpu_percent() / 100
        seen = Seen()
        for one in await asyncio.gather(*driven):
            seen.add(one)
    return Point(
        replicas=replicas,
        seen=seen,
        seconds=plan.seconds,
        router_cpu_s=cpu_s,
        busy=busy,
        asked_tokens=seen.due * plan.tokens,
    )


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def results_of(plan: Plan, points: Sequence[Point], *, load_average: str) -> Results:
    """A line for each size of the pool."""
    results = Results(
        bench="pool",
        hardware=cpu_name(),
        correctness={
            "what": "every answer was given and equals the script",
            "answers": sum(point.seen.answers for point in points),
            "wrong": sum(point.seen.wrong for point in points),
            "failed": {f"{point.replicas} replicas": point.seen.failed for point in points if point.seen.failed},
            "passed": all(not point.seen.wrong and not point.seen.failed for point in points),
        },
        extra={"load_average": load_average, "replica_tokens_per_s": plan.replica_tokens_per_s},
    )
    for point in points:
        for metric, unit, value in (
            ("asked_tokens_per_s", "1/s", round(point.asked_per_s)),
            ("tokens_per_s", "1/s", round(point.tokens_per_s)),
            ("ttft_p50_ms", "ms", round(point.seen.first_token_ms(0.5), 1)),
            ("ttft_p99_ms", "ms", round(point.seen.first_token_ms(0.99), 1)),
            ("router_share", "of a core", round(point.router_share, 3)),
            ("router_tokens_per_s_per_core", "1/s", round(point.tokens_per_s_per_core)),
            ("machine_busy", "of all cores", round(point.busy, 2)),
        ):
            note = f"{point.replicas} replica{'s' if point.replicas > 1 else ''}"
            results.add(
                system="graphpool", model="script", metric=metric, unit=unit, value=value, scope="router", note=note
            )
    return results


def measure(plan: Plan) -> Results:
    """Every size in turn."""
    before, points = os.getloadavg()[0], []
    for replicas in plan.replicas:
        point = asyncio.run(measure_point(plan, replicas))
        points.append(point)
        print(
            f"{replicas} replicas: {point.tokens_per_s:.0f} of {point.asked_per_s:.0f} tokens/s, "
            f"first token p50 {point.seen.first_token_ms(0.5):.0f} ms, p99 {point.seen.first_token_ms(0.99):.0f} ms, "
            f"router {point.router_share:.2f} of a core, failed {point.seen.failed}, wrong {point.seen.wrong}",
            flush=True,
        )
    return results_of(plan, points, load_average=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    standard = Plan()
    parser.add_argument("--replicas", type=int, nargs="+", default=standard.replicas)
    add_plan_options(parser, standard, rows="of a replica", tokens="of an answer", clients="processes that ask")
    add_plan_options(parser, standard, occupancy="part of the capacity that is asked for")
    add_plan_options(parser, standard, step_ms=None, seconds=None, seed=None)
    options = vars(parser.parse_args(arguments))
    results = measure(Plan(**{**options, "replicas": tuple(options["replicas"])}))
    print(results.write())
    return int(not results.correctness["passed"])


if __name__ == "__main__":
    sys.exit(main())
