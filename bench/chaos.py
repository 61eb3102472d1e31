"""What breaks when replicas and connections do? Every token of every answer is compared with the one that was due.

    python -m bench.chaos kills --kills 200 --streams 20000   # SIGKILL at random under load
    python -m bench.chaos gaps --rounds 10                    # how long an answer pauses, by what happened
    python -m bench.chaos schedules --count 500               # two faults at once, on a virtual clock
    python -m bench.chaos model --tokens 64                   # the embedded model, interrupted at every token

Scripted engines in replica processes of their own, a router process, and this process as the clients; `model` runs the
embedded model in deterministic mode, on the CPU. Writes `bench/results/chaos_<name>.json`; exits with 1 unless all is right.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.results_file import Results, cpu_name
from tests.chaos.campaign import Findings, Plan, percentile, run
from tests.chaos.chaos_pool import ChaosPool, proxied_pool
from tests.chaos.oracle import Question, Record
from tests.chaos.schedules import run_schedule

STEP_S = 0.02
GAP_STREAMS = 24


@dataclass(slots=True)
class Gaps:
    """Of one kind of trouble."""

    moved_s: list[float] = field(default_factory=list)
    """Longest wait for a message in each answer that went on elsewhere."""
    stayed_s: list[float] = field(default_factory=list)
    wrong: int = 0

    def take(self, record: Record) -> None:
        longest_s = max(record.longest_gap_s, record.first_token_s or 0.0)
        (self.moved_s if record.attempts > 1 else self.stayed_s).append(longest_s)
        self.wrong += not record.is_right


def kills(options: argparse.Namespace) -> Results:
    """A campaign of SIGKILLs."""
    plan = Plan(
        kills=options.kills,
        streams=options.streams,
        seed=options.seed,
        replicas=options.replicas,
        concurrency=options.concurrency,
    )
    findings = asyncio.run(run(plan))
    print("\n".join(findings.lines()))
    results = _results("kills", is_right=findings.is_flawless, seed=plan.seed)
    results.correctness |= {"own_deaths": findings.own_deaths}
    results.correctness |= {"violations": findings.violations[:20], "errors": dict(findings.errors)}
    for metric, unit, value in _kill_figures(findings):
        _add(results, metric, unit, value, "router")
    return results


def _kill_figures(findings: Findings) -> list[tuple[str, str, float]]:
    return [
        ("kills", "kills", findings.kills),
        ("answers", "answers", findings.plan.streams),
        ("tokens", "tokens", findings.tokens),
        ("lost", "answers", findings.lost),
        ("duplicated", "tokens", findings.duplicated),
        ("changed", "tokens", findings.changed),
        ("moved", "answers", findings.resumed),
        ("gap_p50_ms", "ms", 1000 * percentile(findings.gaps_s, 0.5)),
        ("gap_p99_ms", "ms", 1000 * percentile(findings.gaps_s, 0.99)),
        ("unmoved_gap_p99_ms", "ms", 1000 * percentile(findings.other_gaps_s, 0.99)),
        ("duration_s", "s", findings.duration_s),
        ("router_growth_mib", "MiB", findings.router_mib[1] - findings.router_mib[0]),
        ("router_new_descriptors", "descriptors", findings.router_fds[1] - findings.router_fds[0]),
    ]


async def _kill(pool: ChaosPool) -> None:
    await pool.replicas["r0"].kill()


async def _freeze(pool: ChaosPool) -> None:
    pool.replicas["r0"].send(signal.SIGSTOP)


async def _hang(pool: ChaosPool) -> None:
    await pool.inject("r0", hang_engine={"duration_s": 600.0})


async def _cut(pool: ChaosPool) -> None:
    pool.proxies["r0"].blackhole()


async def _cut_one_way(pool: ChaosPool) -> None:
    pool.proxies["r0"].blackhole(to_target=False)


async def _deafen(pool: ChaosPool) -> None:
    pool.proxies["r0"].blackhole(from_target=False)


async def _reset(pool: ChaosPool) -> None:
    pool.proxies["r0"].reset()


TROUBLES: dict[str, Callable[[ChaosPool], Awaitable[None]]] = {
    "SIGKILL": _kill,
    "SIGSTOP": _freeze,
    "engine hangs": _hang,
    "cut both ways": _cut,
    "cut from the replica": _cut_one_way,
    "cut to the replica": _deafen,
    "connection reset": _reset,
}


def gaps(options: argparse.Namespace) -> Results:
    """The pause in answers, by what happened to their replica."""
    found = {name: asyncio.run(_gaps_of(name, options.rounds, options.seed)) for name in TROUBLES}
    results = _results("gaps", is_right=not any(one.wrong for one in found.values()), seed=options.seed)
    for name, one in found.items():
        for metric, value in (
            ("moved", float(len(one.moved_s))),
            ("gap_p50_ms", 1000 * percentile(one.moved_s, 0.5)),
            ("gap_p99_ms", 1000 * percentile(one.moved_s, 0.99)),
            ("unmoved_gap_p99_ms", 1000 * percentile(one.stayed_s, 0.99)),
            ("wrong", float(one.wrong)),
        ):
            unit = "ms" if metric.endswith("_ms") else "answers"
            _add(results, metric, unit, value, "router", note=name)
    return results


async def _gaps_of(name: str, rounds: int, seed: int) -> Gaps:
    """A fresh pool for each round: what was broken need not come back."""
    found, draw = Gaps(), random.Random(seed)
    for _ in range(rounds):
        async with proxied_pool(3, step_s=STEP_S) as pool:
            questions = [
                Question(prompt=(5, number + 3, draw.randrange(3, 500)), max_tokens=draw.randint(60, 150), seed=number)
                for number in range(GAP_STREAMS)
            ]
            asked = [asyncio.create_task(pool.ask(question)) for question in questions]
            await asyncio.sleep(draw.uniform(0.2, 0.8))
            await TROUBLES[name](pool)
            # Those that come after it may still be given to the broken one.
            late = [asyncio.create_task(pool.ask(question)) for question in questions[:6]]
            for record in await asyncio.gather(*asked, *late):
                found.take(record)
    print(
        f"{name}: {len(found.moved_s)} answers moved, p50 {1000 * percentile(found.moved_s, 0.5):.0f} ms, "
        f"p99 {1000 * percentile(found.moved_s, 0.99):.0f} ms, {found.wrong} wrong",
        flush=True,
    )
    return found


def schedules(options: argparse.Namespace) -> Results:
    """Random schedules of two faults."""
    started_s = time.perf_counter()
    reports = [run_schedule(seed) for seed in range(options.seed, options.seed + options.count)]
    broken = {report.seed: report.problems[:3] for report in reports if report.problems}
    results = _results("schedules", is_right=not broken, seed=options.seed)
    results.correctness["broken"] = broken
    longest_s = max(report.longest_gap_s for report in reports)
    figures: list[tuple[str, str, float]] = [
        ("schedules", "schedules", len(reports)),
        ("broken", "schedules", len(broken)),
        ("moved", "answers", sum(report.resumed for report in reports)),
        ("longest_gap_s", "s of the virtual clock", longest_s),
        ("duration_s", "s", time.perf_counter() - started_s),
    ]
    for metric, unit, value in figures:
        print(f"{metric}: {value:g} {unit}")
        _add(results, metric, unit, value, "router")
    return results


def model(options: argparse.Namespace) -> Results:
    """The embedded model, interrupted at every token."""
    from tests.chaos.real_resume import CASES, RealResume  # torch is imported for this one alone

    real = RealResume()
    outcomes = {}
    for name in CASES:
        outcomes[name] = real.interrupt(real.case(name, max_tokens=options.tokens), range(1, options.tokens))
        print(f"{name}: {outcomes[name].exact} of {outcomes[name].resumed} exact", flush=True)
    is_right = all(one.exact == one.resumed for one in outcomes.values())
    results = _results("model", is_right=is_right, seed=None)
    results.correctness["differences"] = [text for one in outcomes.values() for text in one.differences][:20]
    for name, one in outcomes.items():
        for metric, value in (("resumed", one.resumed), ("exact", one.exact)):
            results.add(
                system="graphpool",
                model="smollm2-135m",
                metric=metric,
                unit="answers",
                value=value,
                scope="replica",
                note=name,
            )
    return results


def _results(name: str, *, is_right: bool, seed: int | None) -> Results:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return Results(
        bench=f"chaos_{name}",
        hardware=cpu_name(),
        correctness={"all_right": is_right, **({} if seed is None else {"seed": seed})},
        extra={"load_average": load},
    )


def _add(results: Results, metric: str, unit: str, value: float, scope: str, note: str | None = None) -> None:
    rounded = round(value, 1) if unit != "answers" else int(value)
    results.add(system="graphpool", model="script", metric=metric, unit=unit, value=rounded, scope=scope, note=note)


BENCHES: dict[str, Callable[[argparse.Namespace], Results]] = {
    "kills": kills,
    "gaps": gaps,
    "schedules": schedules,
    "model": model,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    results = BENCHES[options.name](options)
    print(results.write())
    return int(not results.correctness["all_right"])


if __name__ == "__main__":
    sys.exit(main())
