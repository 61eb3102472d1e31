"""A long run of a pool under Ray Serve: see tests/chaos/cluster_soak.py.

    python -m bench.cluster soak --minutes 30

Writes `bench/results/cluster_soak.json`; exits with 1 if any answer was lost, any token came twice or was not the
expected one, something was still held for clients that were gone, or the router or a replica grew.
"""

from __future__ import annotations

from tests.chaos.cluster_soak import Soaked, SoakPlan, run_soak  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import os
import statistics
from collections.abc import Callable, Sequence

from bench.options import add_plan_options, bench_parser
from bench.results_file import Results, cpu_name
from bench.soak_trend import LIMITS, Points, Trend, trend
from tests.chaos.cluster_vitals import Life, Reading
from tests.chaos.open_loop import at
from tests.fakes.ray_cluster import missing

OURS = ("router", "replica, never killed")
KILLED = "replica, until it is killed"
VALUES: dict[str, tuple[str, Callable[[Reading], float | None]]] = {
    "rss": ("B", lambda reading: reading.rss),
    "descriptors": ("1", lambda reading: reading.descriptors),
    "threads": ("1", lambda reading: reading.threads),
    "tasks": ("1", lambda reading: reading.tasks),
}
LEAST_READINGS = 3
IDLE_TASKS = 4
"""More of them than before the first client would be those of clients that are gone."""


def points_of(life: Life, value: Callable[[Reading], float | None], warm_up_s: float) -> Points:
    """Of its readings after its own warm-up."""
    begin_s = life.readings[0].at_s + warm_up_s
    found = [(reading.at_s, value(reading)) for reading in life.readings if reading.at_s >= begin_s]
    return [(at_s, number) for at_s, number in found if number is not None]


def last_points(lives: Sequence[Life], value: Callable[[Reading], float | None]) -> Points:
    """The last reading of each of them that has served for a while: what those grow to that are killed."""
    served = [[reading for reading in life.readings if reading.tasks is not None] for life in lives]
    last = [readings[-1] for readings in served if len(readings) >= LEAST_READINGS]
    found = [(reading.at_s, value(reading)) for reading in last]
    return sorted((at_s, number) for at_s, number in found if number is not None)


def trends_of(soaked: Soaked) -> dict[tuple[str, str], Trend]:
    """By role and value; of several processes of a role the one that grew most."""
    found: dict[tuple[str, str], Trend] = {}
    roles = dict.fromkeys(life.role for life in soaked.vitals.lives.values())
    for role in roles:
        lives = soaked.vitals.of(role)
        for name, (_, value) in VALUES.items():
            many = (
                [last_points(lives, value)]
                if role == KILLED
                else [points_of(life, value, soaked.plan.warm_up_s) for life in lives]
            )
            trends = [trend(points) for points in many if points]
            if trends:
                found[role, name] = max(trends, key=lambda one: one.growth)
    moments = [moment for moment in soaked.moments if moment.at_s >= soaked.moments[0].at_s + soaked.plan.warm_up_s]
    found["gap p50, of every 10 s", "ms"] = trend([(one.at_s, 1000 * one.gap_p50_s) for one in moments])
    found["gap p99, of every 10 s", "ms"] = trend([(one.at_s, 1000 * one.gap_p99_s) for one in moments])
    return found


def is_flat(name: str, found: Trend) -> bool | None:
    """None for what has no limit."""
    return LIMITS[name].is_flat(found) if name in LIMITS else None


def grew(soaked: Soaked, trends: dict[tuple[str, str], Trend]) -> list[str]:
    """What is ours and did not stay as it was."""
    found = [
        f"{role}: {name} grew by {one.growth:.0f} in {one.window_s:.0f} s"
        for (role, name), one in trends.items()
        if role in (*OURS, KILLED) and is_flat(name, one) is False
    ]
    return found + [
        f"{name}: {after} tasks after the last client, {before} before the first"
        for name, (before, after) in soaked.idle_tasks.items()
        if after > before + IDLE_TASKS
    ]


def results_of(soaked: Soaked) -> Results:
    """A line for each process and value, with the totals of all clients beside them."""
    plan, tally, trends = soaked.plan, soaked.tally, trends_of(soaked)
    growths = grew(soaked, trends)
    results = Results(
        bench="cluster_soak",
        hardware=cpu_name(),
        correctness={
            "all_right": tally.is_flawless and not soaked.left and not growths,
            "seed": plan.seed,
            "problems": tally.problems,
            "left": soaked.left,
            "grew": growths,
            "idle_tasks": {
                name: f"{before} before, {after} after" for name, (before, after) in soaked.idle_tasks.items()
            },
        },
        extra={"machine": _machine(soaked), "graph_hit_rate": _hit_rate(soaked), "by_minute": _by_minute(trends)},
    )
    for metric, unit, value in _totals(soaked):
        results.add(system="graphpool", model="script", metric=metric, unit=unit, value=value, scope="router")
    for (role, name), one in trends.items():
        for metric, value in (
            ("start", one.start), ("end", one.end), ("growth", one.growth), ("per_hour", one.per_hour),
        ):  # fmt: skip
            results.add(
                system="graphpool",
                model="script",
                metric=f"{name}_{metric}",
                unit=VALUES[name][0] if name in VALUES else name,
                value=round(value, 1),
                scope="router",
                note=role,
            )
    return results


def _totals(soaked: Soaked) -> list[tuple[str, str, float]]:
    tally, plan = soaked.tally, soaked.plan
    return [
        ("duration_min", "min", plan.minutes),
        ("kills", "1", len(soaked.whole_s)),
        ("asked", "answers", tally.asked),
        ("complete", "answers", tally.complete),
        ("clients_that_left", "answers", tally.left),
        ("read_slowly", "answers", tally.slow),
        ("moved", "answers", tally.moved),
        ("tokens", "tokens", tally.tokens),
        ("refused", "answers", tally.refused),
        ("lost", "answers", tally.lost),
        ("duplicated", "tokens", tally.duplicated),
        ("changed", "tokens", tally.changed),
        ("gap_p50_ms", "ms", round(1000 * at(0.5, tally.gaps_s), 1)),
        ("gap_p99_ms", "ms", round(1000 * at(0.99, tally.gaps_s), 1)),
        ("moved_gap_p50_ms", "ms", round(1000 * at(0.5, tally.moved_gaps_s))),
        ("moved_gap_p99_ms", "ms", round(1000 * at(0.99, tally.moved_gaps_s))),
        ("first_token_p50_ms", "ms", round(1000 * at(0.5, tally.first_s))),
        ("first_token_p99_ms", "ms", round(1000 * at(0.99, tally.first_s))),
        ("whole_p50_s", "s", round(statistics.median(soaked.whole_s or [0.0]), 1)),
        ("whole_longest_s", "s", round(max(soaked.whole_s, default=0.0), 1)),
    ]


def _machine(soaked: Soaked) -> dict[str, float]:
    moments = soaked.moments
    return {
        "load_average_p50": round(statistics.median(one.load_average for one in moments), 1),
        "load_average_longest": round(max(one.load_average for one in moments), 1),
        "busy_mean": round(statistics.fmean(one.busy for one in moments), 2),
        "rows_in_use_mean": round(statistics.fmean(one.occupancy for one in moments), 2),
        "rows_asked_for": soaked.plan.occupancy,
    }


def _hit_rate(soaked: Soaked) -> float | str:
    last = [life.readings[-1] for life in soaked.vitals.lives.values() if life.role.startswith("replica")]
    graphs = sum(reading.graph_steps for reading in last)
    steps = graphs + sum(reading.eager_steps for reading in last)
    return round(graphs / steps, 4) if graphs else "the scripted engine captures no graphs and reports none"


def _by_minute(trends: dict[tuple[str, str], Trend]) -> dict[str, str]:
    return {
        f"{role}, {name}": " ".join(f"{value / (1 << 20 if name == 'rss' else 1):.1f}" for value in one.by_minute)
        for (role, name), one in trends.items()
    }


def main(arguments: list[str]) -> int:
    parser = bench_parser(__doc__, prog="bench.cluster soak")
    times = dict.fromkeys(("minutes", "warm_up_s", "kill_every_s", "step_s"))
    add_plan_options(parser, SoakPlan(), **times, occupancy="part of the capacity", replicas=None, seed=None)
    options = parser.parse_args(arguments)
    if (problem := missing()) is not None:
        parser.error(problem)
    plan = SoakPlan(**vars(options))
    print(f"{plan.rate_per_s:.2f} clients a second, load average {os.getloadavg()[0]:.1f}", flush=True)
    results = results_of(asyncio.run(run_soak(plan)))
    print(results.write())
    print(results.correctness, flush=True)
    return int(not results.correctness["all_right"])
