"""Workers with real engines that are killed under load: every answer is compared with the undisturbed one of this very run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos_questions import questions
from bench.chaos_results import Figure, gap_figures
from bench.chaos_worker import gpu_memory_mib, start_worker, visible_gpus, wait_listening
from bench.shapes import SHAPES, TINY, write_config
from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig
from tests.chaos.campaign import Campaign, Findings, Plan, percentile
from tests.chaos.chaos_pool import QUICK, ChaosPool
from tests.chaos.oracle import Outcome, Record
from tests.chaos.real_answers import ChoiceAnswer, Divergence, RealQuestion, Transcript, compare, hold_to, watch
from tests.fakes.replica_process import ReplicaProcess
from tests.fakes.router_process import spawn_router

READY_LIMIT_S = 240.0
WHOLE_LIMIT_S = 60.0
"""After the last kill, until all workers are ready."""
ASKED_TOGETHER = 16
TELLING_S = 10.0
CALLS = ClientConfig(max_attempts=1)


@dataclass(slots=True)
class RealPool(ChaosPool):
    """Its replicas hold real engines."""

    worker: Mapping[str, object] = field(default_factory=dict)
    gpus: Sequence[str] = ()
    starting: set[asyncio.subprocess.Process] = field(default_factory=set)
    starts_s: list[float] = field(default_factory=list)
    """From the start of each process until it served."""

    async def spawn(self, name: str, **_: object) -> ReplicaProcess:
        """Start a worker and wait until it serves."""
        gpu = self.gpus[int(name.removeprefix("r")) % len(self.gpus)] if self.gpus else ""
        replica = {"routers": [self.routers[0].address], "name": name, "announce_period_s": 0.2}
        started_s = time.monotonic()
        process = await start_worker(self.worker, replica, gpu=gpu)
        self.starting.add(process)
        try:
            self.replicas[name] = await wait_listening(process)
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self.starting.discard(process)
        self.starts_s.append(time.monotonic() - started_s)
        return self.replicas[name]

    async def close(self) -> None:
        """Kill everything."""
        for process in self.starting:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        # Of a class with slots, super() without arguments finds the class as it was before.
        await ChaosPool.close(self)


@dataclass(slots=True, kw_only=True)
class RealFindings:
    """What a campaign against real engines found, beside Findings."""

    findings: Findings
    starts_s: list[float]
    memory_mib: tuple[float, float]
    """In use on the GPUs, by whatever process, with all workers ready, before the first kill and after the last."""
    by_runner: dict[str, int]
    """Answers by what computed their last step."""
    undisturbed_s: float
    moved: int = 0
    moved_apart: int = 0
    """Answers that went on elsewhere and are not the undisturbed ones."""
    stayed: int = 0
    stayed_apart: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    """Of greedy answers, whose log-probabilities tell."""

    def figures(self, *, is_exact: bool) -> list[Figure]:
        """Of a result."""
        found = self.findings
        exactness: list[Figure] = [
            ("duplicated", "tokens", found.duplicated),
            ("changed", "tokens", found.changed),
            ("violations", "answers", len(found.violations)),
        ]
        nearness: list[Figure] = [
            ("moved_apart", "answers", self.moved_apart),
            ("moved_apart_share", "share", self.moved_apart / max(self.moved, 1)),
            ("others_apart_share", "share", self.stayed_apart / max(self.stayed, 1)),
            ("greedy_partings", "places", len(self.divergences)),
            ("parting_gap_p50", "nats", percentile(self.gaps, 0.5)),
            ("parting_gap_max", "nats", max(self.gaps, default=0.0)),
            ("not_of_the_likeliest", "places", self.untold),
        ]
        return [
            ("kills", "kills", found.kills),
            ("answers", "answers", found.complete + found.lost),
            ("tokens", "tokens", found.tokens),
            ("lost", "answers", found.lost),
            *(exactness if is_exact else nearness),
            *gap_figures(found.gaps_s, found.other_gaps_s, num_moved=found.resumed),
            ("start_s", "s", statistics.fmean(self.starts_s)),
            ("duration_s", "s", found.duration_s),
        ]

    @property
    def gaps(self) -> list[float]:
        """Between the two tokens where greedy answers parted."""
        return [one.gap for one in self.divergences if one.gap is not None]

    @property
    def untold(self) -> int:
        """Where the token that came was not one of the likeliest."""
        return sum(one.gap is None for one in self.divergences)


class RealCampaign:
    """Asks questions whose undisturbed answers are known, while workers are killed."""

    def __init__(self, options: argparse.Namespace, pool: RealPool) -> None:
        self._options = options
        self._pool = pool
        self._is_exact = options.mode == "deterministic"
        self._asked: list[RealQuestion] = []
        self._undisturbed: list[list[ChoiceAnswer]] = []
        self._whole: list[Transcript] = []

    async def run(self) -> RealFindings:
        options, pool = self._options, self._pool
        began_s = time.monotonic()
        undisturbed_s = await self._learn()
        names = [f"r{number}" for number in range(options.workers)]
        await asyncio.gather(*(pool.spawn(name) for name in names[1:]))
        await pool.wait_ready(len(names), READY_LIMIT_S)
        before_mib = gpu_memory_mib()
        print(f"{len(names)} workers ready after {time.monotonic() - began_s:.0f} s", flush=True)
        plan = Plan(
            kills=options.kills,
            streams=options.streams,
            seed=options.seed,
            replicas=options.workers,
            concurrency=options.concurrency,
            outlasts_kills=True,
            limit_s=options.limit_s,
        )
        campaign = Campaign(plan, pool, self._ask)
        telling = asyncio.create_task(_tell(campaign.findings))
        findings = await campaign.run()
        telling.cancel()
        try:
            async with asyncio.timeout(WHOLE_LIMIT_S):
                await asyncio.gather(*(pool.spawn(name) for name in names if not _lives(pool, name)))
                await pool.wait_ready(len(names), WHOLE_LIMIT_S)
        except TimeoutError:
            findings.violations.append(f"the pool was not whole again after {WHOLE_LIMIT_S} s")
        return self._sum_up(findings, undisturbed_s, (before_mib, gpu_memory_mib()))

    async def _learn(self) -> float:
        """The answers of one worker that nothing disturbs: alone in fast mode, where others beside them may matter."""
        options = self._options
        first = await self._pool.spawn("r0")
        async with AsyncGraphpoolClient(first.address, CALLS) as client:
            model = await client.model_info()
            self._asked = questions(
                options.questions,
                seed=options.seed,
                vocab_size=model.vocab_size,
                has_text=model.has_tokenizer,
                shows_gaps=not self._is_exact,
            )
            started_s = time.monotonic()
            turns = asyncio.Semaphore(ASKED_TOGETHER if self._is_exact else 1)

            async def learn(question: RealQuestion) -> list[ChoiceAnswer]:
                async with turns:
                    whole = await watch(client, question)
                assert whole.record.outcome is Outcome.COMPLETE, whole.record.error
                assert not whole.record.violations, whole.record.violations
                return whole.choices

            self._undisturbed = list(await asyncio.gather(*map(learn, self._asked)))
            took_s = time.monotonic() - started_s
        print(f"{len(self._asked)} undisturbed answers of {model.name} in {took_s:.1f} s", flush=True)
        return took_s

    async def _ask(self, draw: random.Random) -> Record:
        number = draw.randrange(len(self._asked))
        whole = await watch(self._pool.client, self._asked[number])
        if whole.record.outcome is Outcome.COMPLETE:
            compare(whole, self._undisturbed[number])
            if self._is_exact:
                hold_to(whole, self._undisturbed[number])
        whole.choices.clear()  # thousands of them are kept
        self._whole.append(whole)
        return whole.record

    def _sum_up(self, findings: Findings, undisturbed_s: float, memory_mib: tuple[float, float]) -> RealFindings:
        complete = [whole for whole in self._whole if whole.record.outcome is Outcome.COMPLETE]
        moved = [whole for whole in complete if whole.record.attempts > 1]
        apart = [whole for whole in complete if whole.divergences]
        moved_apart = [whole for whole in moved if whole.divergences]
        runners = [whole.runner for whole in complete]
        return RealFindings(
            findings=findings,
            starts_s=self._pool.starts_s,
            memory_mib=memory_mib,
            by_runner={name: runners.count(name) for name in sorted(set(runners))},
            undisturbed_s=undisturbed_s,
            moved=len(moved),
            moved_apart=len(moved_apart),
            stayed=len(complete) - len(moved),
            stayed_apart=len(apart) - len(moved_apart),
            divergences=[one for whole in apart if whole.question.shows_near_ties for one in whole.divergences],
        )


async def run(options: argparse.Namespace) -> RealFindings:
    """The whole campaign."""
    with tempfile.TemporaryDirectory() as folder:
        async with real_pool(worker_values(options, Path(folder)), options) as pool:
            return await RealCampaign(options, pool).run()


@contextlib.asynccontextmanager
async def real_pool(worker: Mapping[str, object], options: argparse.Namespace) -> AsyncIterator[RealPool]:
    """A router, and no replica yet."""
    router = await spawn_router({**QUICK, "wait_for_replica_s": 30.0})
    gpus = visible_gpus() if options.device == "cuda" else []
    pool = RealPool([router], AsyncGraphpoolClient(router.address, CALLS), {}, worker=worker, gpus=gpus)
    try:
        yield pool
    finally:
        await pool.close()


def worker_values(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """A WorkerConfig as plain values."""
    is_small = options.model == TINY
    values: dict[str, object] = {
        "model": options.model,
        "device": options.device,
        "deterministic": options.mode == "deterministic",
        "max_model_len": 256 if is_small else 512,
        "max_batch": 64,
        "buckets": [1, 8, 32, 64],
        "kv_cache_bytes": options.kv_mib << 20,
        "capture": "startup",
        "cpu_threads": options.threads,
    }
    if options.device == "cpu":
        values |= {"graphs": "fake"} if is_small else {"max_batch": 8, "buckets": [1, 4, 8]}
    if options.random_weights or is_small:
        is_shape = options.model == TINY or options.model in SHAPES
        values |= {
            "model": str(write_config(options.model, folder)) if is_shape else options.model,
            "load_format": "dummy",
        }
    return values


def report(found: RealFindings) -> list[str]:
    """For people."""
    before, after = found.memory_mib
    lines = [
        *found.findings.lines(),
        f"starts {min(found.starts_s):.1f} to {max(found.starts_s):.1f} s, mean {statistics.fmean(found.starts_s):.1f} s; "
        f"GPU memory {before:.0f} -> {after:.0f} MiB; answers by runner {found.by_runner}",
        f"not the undisturbed answer: {found.moved_apart} of {found.moved} that went on elsewhere, "
        f"{found.stayed_apart} of {found.stayed} others",
    ]
    if found.divergences:
        gaps = sorted(found.gaps)
        shown = ", ".join(f"{gap:.4f}" for gap in gaps[-20:])
        lines.append(
            f"greedy answers parted {len(found.divergences)} times, {found.untold} not between the likeliest; gaps {shown}"
        )
    return lines


async def _tell(findings: Findings) -> None:
    """How far it is, now and then."""
    while True:
        await asyncio.sleep(TELLING_S)
        print(
            f"{findings.kills} kills, {findings.complete} answers whole, {findings.resumed} went on elsewhere, "
            f"{findings.lost} lost, {findings.changed} tokens changed",
            flush=True,
        )


def _lives(pool: RealPool, name: str) -> bool:
    return pool.replicas[name].process.returncode is None
