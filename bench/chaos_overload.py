"""More requests than a pool can answer, from clients that do not wait: what is answered, and what the others are told."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from typing import Any

import grpc

from bench.chaos_results import Figure, add_figures, chaos_results
from bench.replica_grpc import free_port
from bench.results_file import Results
from cluster.client import AsyncGraphpoolClient, CallError
from cluster.config import ClientConfig
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.open_loop import Flood, flood
from tests.fakes.scrape import scrape

MAX_ROWS, STEP_S, TOKENS = 8, 0.02, 16
NUM_REPLICAS = 2
CAPACITY = NUM_REPLICAS * MAX_ROWS / (STEP_S * TOKENS)
"""Answers a second: 50."""
DEADLINE_S = 2.0
FACTORS = (1.0, 1.3, 2.0, 5.0, 10.0)
PEAKS = (1.0, 1.3)
"""The better of these is what the pool can do."""
AFTERWARDS = 0.4
PROMPTLY_S = 1.0
RECOVERY_S = 5.0
MIN_GOODPUT, MAX_REJECT_MS, MAX_AMPLIFICATION = 0.95, 10.0, 1.10
ALLOWED = {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


class Overload:
    """Floods of one pool, and what was not as it should be."""

    def __init__(self, pool: ChaosPool, metrics_address: str, options: argparse.Namespace) -> None:
        self._pool = pool
        self._metrics_address = metrics_address
        self._seconds = options.seconds
        self._draw = random.Random(options.seed)
        self.wrong: list[str] = []
        self.missed: list[str] = []
        self.figures: dict[str, list[Figure]] = {}

    async def run(self) -> None:
        """All of it."""
        await self._flood(0.5, 2.0)  # the router learns how long answers are
        floods = {factor: await self._flood(factor, self._seconds) for factor in FACTORS}
        peak = max(floods[factor].goodput for factor in PEAKS)
        for factor, found in floods.items():
            self._judge(f"{factor:g}x", found, peak)
        after = await self._flood(AFTERWARDS, RECOVERY_S + 3)
        recovered_s = after.recovered_s(PROMPTLY_S)
        self.figures[f"{AFTERWARDS:g}x after that"] = [*_figures(after, peak), ("recovery_s", "s", recovered_s)]
        self._hold("recovery", recovered_s <= RECOVERY_S, f"{recovered_s:.1f} s")
        await self._try_again()

    async def _flood(self, factor: float, seconds: float) -> Flood:
        address = self._pool.routers[0].address
        found = await flood(
            address, factor * CAPACITY, seconds, rng=self._draw, max_tokens=TOKENS, timeout_s=DEADLINE_S
        )
        print(f"{factor:g}x {found.describe()}", flush=True)
        self.wrong += sorted(set(found.codes) - ALLOWED)
        rejects = found.of(grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.wrong += [f"a pushback of {one.pushback_ms} ms" for one in rejects if not 50 <= one.pushback_ms <= 6000]
        return found

    def _judge(self, name: str, found: Flood, peak: float) -> None:
        self.figures[name] = _figures(found, peak)
        share, reject_ms = found.goodput / peak, found.reject_ms(0.99)
        self._hold(
            f"{name} goodput", name in {f"{factor:g}x" for factor in PEAKS} or share >= MIN_GOODPUT, f"{share:.2f}"
        )
        self._hold(f"{name} reject p99", reject_ms <= MAX_REJECT_MS, f"{reject_ms:.1f} ms")

    async def _try_again(self) -> None:
        """As clients come: they may try four times."""
        before, ends = await scrape(self._metrics_address), Counter[str]()
        async with AsyncGraphpoolClient(self._pool.routers[0].address, ClientConfig(timeout_s=DEADLINE_S)) as client:

            async def ask(seed: int) -> None:
                try:
                    await client.generate((10, 20, 30), max_tokens=TOKENS, seed=seed)
                    ends["OK"] += 1
                except CallError as error:
                    ends[error.code.name] += 1

            async with asyncio.TaskGroup() as asking:
                for seed in range(int(5 * CAPACITY * self._seconds)):
                    asking.create_task(ask(seed))
                    await asyncio.sleep(self._draw.expovariate(5 * CAPACITY))
        after = await scrape(self._metrics_address)
        calls = _num_calls(after) - _num_calls(before)
        placed = after.value("placements_total") - before.value("placements_total")
        figures: list[Figure] = [
            ("offered", "answers", ends.total()),
            ("answered", "answers", ends["OK"]),
            ("calls_ratio", "ratio", calls / ends.total()),
            ("placements_ratio", "ratio", placed / ends.total()),
        ]
        self.figures["5x, four tries"] = figures
        print(f"5x, four tries: {figures}", flush=True)
        self._hold("amplification", calls <= MAX_AMPLIFICATION * ends.total(), f"{calls / ends.total():.2f}")
        self.wrong += sorted(set(ends) - ALLOWED)

    def _hold(self, goal: str, is_met: bool, found: str) -> None:
        self.missed += [] if is_met else [f"{goal}: {found}"]


def _num_calls(found: Any) -> float:
    return float(sum(found.by_labels("rpcs_total", "method", "code").values()))


def _figures(found: Flood, peak: float) -> list[Figure]:
    late = len(found.of(grpc.StatusCode.DEADLINE_EXCEEDED))
    return [
        ("offered", "answers", len(found.outcomes)),
        ("answered", "answers", len(found.of(grpc.StatusCode.OK))),
        ("late", "answers", late),
        ("goodput", "1/s", found.goodput),
        ("goodput_share", "ratio", found.goodput / peak),
        ("reject_p50_ms", "ms", found.reject_ms(0.5)),
        ("reject_p99_ms", "ms", found.reject_ms(0.99)),
        ("plain_call_p99_ms", "ms", found.plain_ms(0.99)),
        ("answer_p99_s", "s", found.answer_s(0.99)),
    ]


def overload(options: argparse.Namespace) -> Results:
    """More requests than the pool can answer."""
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Results:
    metrics_address = f"127.0.0.1:{free_port()}"
    async with chaos_pool(
        NUM_REPLICAS, router={"metrics_listen": metrics_address}, max_rows=MAX_ROWS, step_s=STEP_S
    ) as pool:
        run = Overload(pool, metrics_address, options)
        await run.run()
    results = chaos_results("overload", is_right=not run.wrong, seed=options.seed)
    results.correctness |= {"wrong": run.wrong[:20], "goals_missed": run.missed}
    for name, figures in run.figures.items():
        add_figures(results, figures, note=name)
    print(f"goals missed: {run.missed or 'none'}")
    return results
