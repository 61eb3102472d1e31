"""The parts of a run over a pool under Serve: starts, and what happens to replicas under load."""

from __future__ import annotations

from bench.serve_pool import BenchPool, ReplicaLoad  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

from bench.results_file import Results
from bench.serve_load import Findings, Load, Question
from bench.serve_memory import MemoryWatch
from bench.serve_plan import Plan
from cluster.autoscale.config import ScalingConfig
from cluster.serve_app import PoolConfig

DRAIN_S = 30.0
FREED = 0.8
"""Part of a replica's memory whose return counts as all: what comes next takes some at once."""
MEMORY_WAIT_S = 5.0
SCALING = ScalingConfig(min_replicas=1, max_replicas=2, decide_every_s=0.5, down_after_s=5.0, replica_start_s=60.0)


class Run:
    """One run; each public method is a part, to be called in the order in which they are written."""

    def __init__(self, plan: Plan, pool: BenchPool, watch: MemoryWatch, results: Results) -> None:
        self.plan = plan
        self._pool = pool
        self._watch = watch
        self._results = results
        self._questions: list[Question] = []
        self._load: Load | None = None
        self._config: PoolConfig | None = None
        self._label = ""
        self._empty: tuple[int, ...] = ()
        """Memory in use without replicas."""

    async def start(self, note: str) -> None:
        """One replica in the fast mode, from nothing to all graphs; then it is taken away."""
        config = PoolConfig(
            worker=self.plan.fast,
            replica=self._pool.replica_config(),
            num_gpus=1.0,
            drain_timeout_s=1.0,
            health_check_timeout_s=10.0,
        )
        try:
            await self._start(config, 1, f"{note} start")
        finally:
            await self._pool.remove(20)

    async def start_two(self, share: float) -> None:
        """Two replicas in deterministic mode, and what they answer while nothing else runs."""
        if self._config is not None:
            await self._close_load()
            await self._pool.remove()
        await asyncio.sleep(1.0)
        self._empty, self._label = self._watch.now(), f"{share:g} GPU each"
        self._config = PoolConfig(
            worker=self.plan.deterministic,
            replica=self._pool.replica_config(),
            num_replicas=2,
            num_gpus=share,
            num_cpus=0.5,
            drain_timeout_s=DRAIN_S,
            health_check_timeout_s=10.0,
        )
        found = await self._start(self._config, 2, f"2 deterministic, {self._label}")
        self._results.extra.setdefault("places", {})[self._label] = await self._places(found)
        if not self._questions:
            self._questions = await self._undisturbed()
        self._load = Load(self._pool.client, self._questions)

    async def nothing(self) -> None:
        """Steady load, to compare with."""
        load = self._begin(self.plan.rate_per_s)
        await asyncio.sleep(2 * self.plan.calm_s)
        self._report("steady load", await load.finish())

    async def kill(self) -> None:
        """SIGKILL to a replica that is answering; a new one takes its place."""
        load = self._begin(self.plan.rate_per_s)
        await asyncio.sleep(self.plan.calm_s)
        victim = await self._busy()
        place = await self._pool.place_of(victim.incarnation)
        killed_s = time.monotonic()
        os.kill(place.pid, signal.SIGKILL)
        freed_s = await self._freed(killed_s, place.visible_devices)
        await self._pool.until_count(2, 50 * self.plan.slowness, without=victim.incarnation)
        whole_s = time.monotonic() - killed_s
        await asyncio.sleep(self.plan.calm_s)
        self._report("a kill", await load.finish(), whole_s=whole_s, memory_freed_s=freed_s)

    async def drain(self) -> None:
        """A replica is drained by request; Serve puts a new one in its place."""
        load = self._begin(self.plan.rate_per_s)
        await asyncio.sleep(self.plan.calm_s)
        victim = await self._busy()
        began_s = time.monotonic()
        await self._pool.client.drain(victim.replica, grace_s=DRAIN_S, timeout_s=DRAIN_S + 15)
        drained_s = time.monotonic() - began_s
        await self._pool.until_count(2, 60 * self.plan.slowness, without=victim.incarnation)
        whole_s = time.monotonic() - began_s
        await asyncio.sleep(self.plan.calm_s)
        self._report("a drain", await load.finish(), whole_s=whole_s, drained_s=drained_s)

    async def scale(self) -> None:
        """From two replicas to the one that little load needs, to two for more, and back."""
        assert self._config is not None
        limit_s, plan = 45 * self.plan.slowness, self.plan
        load = self._begin(plan.low_per_s)
        await self._pool.deploy(replace(self._config, scaling=replace(SCALING, target_occupancy=plan.occupancy)))
        await self._pool.until_left(limit_s)
        await asyncio.sleep(plan.calm_s)
        before, began_s = load.cut(), time.monotonic()
        load.set_rate(plan.high_per_s)
        await self._pool.until_count(2, limit_s)
        up_s = time.monotonic() - began_s
        await asyncio.sleep(plan.calm_s)
        up, began_s = load.cut(), time.monotonic()
        load.set_rate(plan.low_per_s)
        await self._pool.until_left(limit_s)
        down_s = time.monotonic() - began_s
        await asyncio.sleep(plan.calm_s / 2)
        down = await load.finish()
        self._report("scaled down to 1", before)
        self._report("load rises: 1 to 2", up, whole_s=up_s)
        self._report("load falls: 2 to 1", down, whole_s=down_s)

    async def close(self) -> None:
        """End the load."""
        await self._close_load()

    async def _start(self, config: PoolConfig, count: int, note: str) -> dict[str, ReplicaLoad]:
        """Deploy and time it: seconds from the call, of the last replica where there are several."""
        began_s = time.time()
        first = asyncio.create_task(self._first_token())
        try:
            await self._pool.deploy(config)
            found = await self._pool.until_count(count, self.plan.ready_limit_s)
            ready_s = time.time()
            times = {"first_token": await first}
        finally:
            first.cancel()
        is_full, captured_s = await self._pool.until_captured(self.plan.capture_limit_s)
        places = [place for place in await self._pool.places() if place.incarnation in found]
        for place in places:
            for phase, seconds in {"process": 0.0, **place.phases}.items():
                times[phase] = max(times.get(phase, 0.0), place.began_s + seconds)
        times["ready"] = ready_s
        if captured_s is not None:
            times["all_graphs"] = captured_s
        for phase, when_s in sorted(times.items(), key=lambda item: item[1]):
            self._add(f"start_{phase}_s", "s", round(when_s - began_s, 2), note)
        graphs = {name: sum(place.values.get(name, 0) for place in places) for name in GRAPH_VALUES}
        self._results.extra.setdefault("graphs", {})[note] = {"is_full": is_full, **graphs}
        print(f"  graphs: full {is_full}, {graphs}", flush=True)
        return found

    async def _first_token(self) -> float:
        """Unix time of the first token that a client gets."""
        stream = self._pool.client.stream([5, 6, 7], max_tokens=1, temperature=0.0, ignore_eos=True, timeout_s=170.0)
        async for piece in stream:
            if piece.token_ids:
                return time.time()
        raise RuntimeError("an answer without a token")

    async def _undisturbed(self) -> list[Question]:
        """One question after the other."""
        draw, found = random.Random(7), []
        vocab_size = (await self._pool.client.model_info(timeout_s=5)).vocab_size
        for _ in range(self.plan.num_questions):
            prompt = tuple(draw.randrange(3, vocab_size) for _ in range(self.plan.prompt_tokens))
            answer = await self._pool.client.generate(
                prompt, max_tokens=self.plan.answer_tokens, temperature=0.0, ignore_eos=True, timeout_s=60.0
            )
            found.append(Question(prompt=prompt, answer=tuple(answer.choices[0].token_ids)))
        return found

    def _begin(self, rate_per_s: float) -> Load:
        assert self._load is not None
        self._load.cut()
        self._load.set_rate(rate_per_s)
        return self._load

    async def _busy(self) -> ReplicaLoad:
        """A ready replica that answers something right now, if any does soon."""
        for _ in range(50):
            found = sorted((await self._pool.ready()).values(), key=lambda one: one.router_streams)
            if found and found[-1].router_streams:
                break
            await asyncio.sleep(0.02)
        if len(found) < 2:
            raise RuntimeError(f"{len(found)} replicas are ready, there should be 2")
        return found[-1]

    async def _freed(self, since_s: float, devices: str) -> float | None:
        """Seconds until the memory of one of two replicas was back; None = not seen."""
        now = self._watch.now()
        gpu = int(devices) if devices.isdigit() and int(devices) < len(now) else 0
        if gpu >= min(len(now), len(self._empty)):
            return None
        taken = now[gpu] - self._empty[gpu]
        num_there = 2 if self._config is not None and (self._config.num_gpus or 1) < 1 else 1
        limit = now[gpu] - FREED * taken / num_there
        give_up_s = time.monotonic() + MEMORY_WAIT_S
        while time.monotonic() < give_up_s:
            if (seconds := self._watch.fell_after(since_s, gpu, limit)) is not None:
                return seconds
            await asyncio.sleep(0.02)
        return None

    async def _places(self, found: dict[str, ReplicaLoad]) -> list[dict[str, Any]]:
        """Which process has which GPU, and what is in use on each."""
        used, places = self._watch.now(), []
        for place in await self._pool.places():
            if place.incarnation in found:
                who = {"replica": found[place.incarnation].replica, "pid": place.pid, "device": place.device}
                places.append({**who, "visible_devices": place.visible_devices})
        taken = [round((now - empty) / 2**20) for now, empty in zip(used, self._empty, strict=False)]
        self._results.extra.setdefault("memory_mib", {})[self._label] = taken
        print(f"  {places}, MiB taken: {taken}", flush=True)
        devices = [str(place["visible_devices"]) for place in places]
        if self._config is not None and self._config.num_gpus == 1.0:
            self._check(len(set(devices)) == 2 and all("," not in one for one in devices), f"devices are {devices}")
            if self.plan.device == "cuda":
                self._check(min(taken[:2]) > 1024, f"not both GPUs are used: {taken} MiB")
        return places

    def _report(self, what: str, found: Findings, **values: float | None) -> None:
        note = f"{what}, {self._label}"
        figures: dict[str, tuple[str, float | None]] = {
            "answers": ("answers", len(found.records)),
            "lost": ("answers", found.lost),
            "refused": ("answers", found.refused),
            "duplicated": ("answers", found.duplicated),
            "changed": ("answers", found.changed),
            "moved": ("answers", len(found.moved)),
            "moved_gap_p50_ms": ("ms", _quantile_ms([one.longest_gap_s for one in found.moved], 0.5)),
            "moved_gap_max_ms": ("ms", _quantile_ms([one.longest_gap_s for one in found.moved], 1.0)),
            "other_gap_p99_ms": ("ms", _quantile_ms([one.longest_gap_s for one in found.stayed], 0.99)),
            "ttft_p50_ms": ("ms", _quantile_ms(found.first_tokens_s, 0.5)),
            "ttft_p99_ms": ("ms", _quantile_ms(found.first_tokens_s, 0.99)),
            **{name: ("s", None if value is None else round(value, 2)) for name, value in values.items()},
        }
        for metric, (unit, value) in figures.items():
            if value is not None:
                self._add(metric, unit, value, note)
        self._check(found.is_flawless, f"{note}: {len(found.records)} answers, {dict(found.problems.most_common(3))}")

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right:
            print(f"  WRONG: {what}", flush=True)
            self._results.correctness.setdefault("wrong", []).append(what[:300])

    def _add(self, metric: str, unit: str, value: float, note: str) -> None:
        self._results.add(
            system="graphpool", model=self.plan.model, metric=metric, unit=unit, value=value, scope="router", note=note
        )
        print(f"  {note}: {metric} {value:g} {unit}", flush=True)

    async def _close_load(self) -> None:
        if self._load is not None:
            await self._load.close()
            self._load = None


GRAPH_VALUES = ("graph_capture_seconds", "graph_quarantined", "graph_dropped", "graph_pool_bytes")


def _quantile_ms(seconds: list[float], share: float) -> float | None:
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) if ordered else None
