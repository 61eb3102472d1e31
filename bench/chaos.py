"""What breaks when replicas and connections do? Every token of every answer is compared with the one that was due.

    python -m bench.chaos kills --kills 200 --streams 20000   # SIGKILL at random under load
    python -m bench.chaos gaps --rounds 10                    # how long an answer pauses, by what happened
    python -m bench.chaos schedules --count 500               # two faults at once, on a virtual clock
    python -m bench.chaos model --tokens 64                   # the embedded model, interrupted at every token
    python -m bench.chaos gpu --kills 20 --streams 2000       # SIGKILL of workers with real engines, on a GPU
    python -m bench.chaos isolation                           # what streams notice of trouble on another replica
    python -m bench.chaos overload                            # up to ten times what the pool can answer

Scripted engines in replica processes of their own, a router process, and this process as the clients; `model` runs the
embedded model in deterministic mode, on the CPU. `gpu` runs real engines, all on one GPU or one on each; in deterministic mode every
answer must be the one that an undisturbed worker gave at the beginning of the run, in fast mode those that differ are
counted. Writes `bench/results/chaos_<name>.json`; exits with 1 unless all is right.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos_isolation import isolation
from bench.chaos_overload import overload
from bench.chaos_results import Figure, add_figures, chaos_results, gap_figures
from bench.options import bench_parser, require_gpu
from bench.results_file import Results
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
    results = chaos_results("kills", is_right=findings.is_flawless, seed=plan.seed)
    results.correctness |= {"own_deaths": findings.own_deaths}
    results.correctness |= {"violations": findings.violations[:20], "errors": dict(findings.errors)}
    add_figures(results, _kill_figures(findings))
    return results


def _kill_figures(findings: Findings) -> list[Figure]:
    return [
        ("kills", "kills", findings.kills),
        ("answers", "answers", findings.complete + findings.lost),
        ("tokens", "tokens", findings.tokens),
        ("lost", "answers", findings.lost),
        ("duplicated", "tokens", findings.duplicated),
        ("changed", "tokens", findings.changed),
        *gap_figures(findings.gaps_s, findings.other_gaps_s, num_moved=findings.resumed),
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
    results = chaos_results("gaps", is_right=not any(one.wrong for one in found.values()), seed=options.seed)
    for name, one in found.items():
        figures: list[Figure] = [
            *gap_figures(one.moved_s, one.stayed_s, num_moved=len(one.moved_s)),
            ("wrong", "answers", one.wrong),
        ]
        add_figures(results, figures, note=name)
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
    results = chaos_results("schedules", is_right=not broken, seed=options.seed)
    results.correctness["broken"] = broken
    longest_s = max(report.longest_gap_s for report in reports)
    figures: list[Figure] = [
        ("schedules", "schedules", len(reports)),
        ("broken", "schedules", len(broken)),
        ("moved", "answers", sum(report.resumed for report in reports)),
        ("longest_gap_s", "s of the virtual clock", longest_s),
        ("duration_s", "s", time.perf_counter() - started_s),
    ]
    for metric, unit, value in figures:
        print(f"{metric}: {value:g} {unit}")
    add_figures(results, figures)
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
    results = chaos_results("model", is_right=is_right, seed=None)
    results.correctness["differences"] = [text for one in outcomes.values() for text in one.differences][:20]
    for name, one in outcomes.items():
        figures: list[Figure] = [("resumed", "answers", one.resumed), ("exact", "answers", one.exact)]
        add_figures(results, figures, model="smollm2-135m", scope="replica", note=name)
    return results


def gpu(options: argparse.Namespace) -> Results:
    """A campaign of SIGKILLs against real engines."""
    from bench.chaos_gpu import report, run  # names the processes' own modules, which others need not have
    from bench.chaos_worker import gpu_name

    found = asyncio.run(run(options))
    print("\n".join(report(found)))
    findings = found.findings
    is_exact = options.mode == "deterministic"
    is_right = not findings.lost and findings.kills == options.kills and (findings.is_flawless or not is_exact)
    name = gpu_name() if options.device == "cuda" else ""
    results = chaos_results("gpu" if is_exact else "gpu_fast", is_right=is_right, seed=options.seed, gpu=name)
    results.correctness |= {"own_deaths": findings.own_deaths, "violations": findings.violations[:20]}
    results.correctness |= {"errors": dict(findings.errors), "by_runner": found.by_runner}
    results.extra["gaps_of_greedy"] = sorted(found.gaps)
    add_figures(results, found.figures(is_exact=is_exact), model=Path(options.model).name)
    return results


BENCHES: dict[str, Callable[[argparse.Namespace], Results]] = {
    "kills": kills,
    "gaps": gaps,
    "schedules": schedules,
    "model": model,
    "gpu": gpu,
    "isolation": isolation,
    "overload": overload,
}


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__)
    benches = parser.add_subparsers(dest="name", required=True)
    made = {name: benches.add_parser(name, help=bench.__doc__) for name, bench in BENCHES.items()}
    for one in made.values():
        one.add_argument("--seed", type=int, default=1)
    for name, kills, streams, concurrency in (("kills", 200, 20_000, 256), ("gpu", 20, 2000, 48)):
        made[name].add_argument("--kills", type=int, default=kills)
        made[name].add_argument("--streams", type=int, default=streams, help="at least; more until the last kill")
        made[name].add_argument("--concurrency", type=int, default=concurrency)
    made["kills"].add_argument("--replicas", type=int, default=8)
    made["gaps"].add_argument("--rounds", type=int, default=10)
    made["schedules"].add_argument("--count", type=int, default=500)
    made["model"].add_argument("--tokens", type=int, default=64)
    _add_gpu_arguments(made["gpu"])
    made["isolation"].add_argument("--virtual", action="store_true", help="on a virtual clock: the policies alone")
    made["isolation"].add_argument("--replicas", type=int, default=4)
    made["isolation"].add_argument("--rate", type=float, default=60.0, help="requests a second")
    for name, seconds in (("isolation", 12.0), ("overload", 10.0)):
        made[name].add_argument("--seconds", type=float, default=seconds, help="of each part")
    return parser


def _add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=("deterministic", "fast"), default="deterministic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="smollm2-135m", help="a model, a directory, or a shape of bench.shapes")
    parser.add_argument(
        "--random-weights", action="store_true", help="of the model's shape; a directory needs no weights"
    )
    parser.add_argument("--workers", type=int, default=3, help="two serve while a third starts")
    parser.add_argument("--questions", type=int, default=240, help="different ones")
    parser.add_argument("--kv-mib", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2, help="of one worker")
    parser.add_argument("--limit-s", type=float, default=150.0, help="after that no kill is waited for")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    require_gpu(parser, getattr(options, "device", "cpu"))
    results = BENCHES[options.name](options)
    print(results.write())
    return int(not results.correctness["all_right"])


if __name__ == "__main__":
    sys.exit(main())
