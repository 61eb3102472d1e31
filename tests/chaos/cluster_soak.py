"""A pool under Ray Serve that answers for a long time, loses a replica every minute, and is to hold no more at the end.

A replica that is killed within minutes has no time to grow, so some of them never are.
"""

from __future__ import annotations

from tests.chaos.cluster_pool import (
    READY,
    ClusterPool,
    cluster_pool,
)  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import os
import random
import time
from dataclasses import dataclass, field

import psutil

from protos import control_pb2
from tests.chaos.cluster_clients import Habits, SoakClients, Tally, mean_steps
from tests.chaos.cluster_vitals import Vitals, metrics_ports, role_of
from tests.chaos.open_loop import at
from tests.fakes.ray_cluster import PATIENT

SLOW_S = 10.0
"""A replacement that takes longer is told of while it is awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """How long, and how much."""

    minutes: float = 30.0
    warm_up_s: float = 180.0
    """Readings of processes that are younger do not count."""
    kill_every_s: float = 60.0
    read_every_s: float = 10.0
    occupancy: float = 0.7
    """Part of the pool's capacity that is asked for."""
    replicas: int = 4
    kept: int = 2
    """Of them, those that are never killed."""
    rows: int = 8
    step_s: float = 0.08
    habits: Habits = field(default_factory=Habits)
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("minutes", "kill_every_s", "read_every_s", "rows", "step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if not 0 <= self.warm_up_s < 60 * self.minutes:
            raise ValueError(f"warm_up_s is {self.warm_up_s}, must be less than the {self.minutes} minutes")
        if not 0 < self.occupancy <= 1:
            raise ValueError(f"occupancy is {self.occupancy}, must be in (0, 1]")
        if not 1 <= self.kept < self.replicas:
            raise ValueError(f"kept is {self.kept}, must be at least 1 and less than the {self.replicas} replicas")

    @property
    def steps_per_s(self) -> float:
        """What all rows of the pool together can do."""
        return self.replicas * self.rows / self.step_s

    @property
    def rate_per_s(self) -> float:
        """Clients that come."""
        return self.occupancy * self.steps_per_s / mean_steps(self.habits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What clients and the machine saw between two readings."""

    at_s: float
    gap_p50_s: float
    gap_p99_s: float
    occupancy: float
    """Part of the rows of READY replicas that was in use."""
    load_average: float
    busy: float
    """Part of all cores of the machine that was in use, by whatever."""


@dataclass(slots=True, kw_only=True)
class Soaked:
    """What a run found."""

    plan: SoakPlan
    tally: Tally
    vitals: Vitals
    moments: list[Moment] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    """From each kill until as many replicas were READY as before, one of them new."""
    idle_tasks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of the event loops of the router and of the kept replicas: before the first client, and after the last one."""
    left: list[str] = field(default_factory=list)
    """What the router or a replica still held for clients that were gone."""


class Soak:
    """One run over a pool."""

    def __init__(self, plan: SoakPlan, pool: ClusterPool, ports: range) -> None:
        self.found = Soaked(plan=plan, tally=Tally(), vitals=Vitals(ports))
        self._plan = plan
        self._pool = pool
        self._router = psutil.Process(pool.router.pid)
        self._kept: frozenset[psutil.Process] = frozenset()
        self._ends_s = 0.0
        self._seen = 0

    async def run(self, first_port: int) -> Soaked:
        """Everything of the plan."""
        plan, found = self._plan, self.found
        await self._pool.deploy(
            num_replicas=plan.replicas,
            max_rows=plan.rows,
            step_s=plan.step_s,
            metrics_listen=f"127.0.0.1:{first_port}",
            health_check_timeout_s=30.0,
        )
        await self._pool.whole(plan.replicas)
        self._kept = frozenset(sorted(self._replicas(), key=lambda process: process.pid)[: plan.kept])
        before = await self._idle_tasks()
        clients = SoakClients(self._pool.client, rate_per_s=plan.rate_per_s, habits=plan.habits, seed=plan.seed)
        found.tally = clients.tally
        self._ends_s = time.monotonic() + 60 * plan.minutes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.come(self._is_over))
            tasks.create_task(self._kill_on())
            tasks.create_task(self._read_on())
        found.left = await self._left()
        after = await self._idle_tasks()
        found.idle_tasks = {name: (count, after[name]) for name, count in before.items()}
        return found

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_s

    def _replicas(self) -> list[psutil.Process]:
        return [process for process in self._pool.ray.processes() if role_of(process) == "replica"]

    async def _kill_on(self) -> None:
        """Every so often, one that is not kept; the next one not before the pool is whole again."""
        draw, due_s = random.Random(self._plan.seed), time.monotonic()
        while (due_s := due_s + self._plan.kill_every_s) < self._ends_s - self._plan.kill_every_s / 2:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            victims = [process for process in self._replicas() if process not in self._kept]
            before, began_s = await self._pool.ready(), time.monotonic()
            draw.choice(sorted(victims, key=lambda process: process.pid)).kill()
            await self._replaced(before)
            self.found.whole_s.append(time.monotonic() - began_s)

    async def _replaced(self, before: set[str]) -> None:
        def is_whole(ready: set[str]) -> bool:
            return len(ready) == self._plan.replicas and bool(ready - before)

        try:
            await self._pool.until(is_whole, SLOW_S, look_every_s=0.25)
        except TimeoutError as error:
            print(error, flush=True)
            await self._pool.until(is_whole, 300.0, look_every_s=0.25)

    async def _read_on(self) -> None:
        psutil.cpu_percent()
        due_s = time.monotonic()
        while not self._is_over():
            due_s += self._plan.read_every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self.found.vitals.take(self._processes())
            await self._note_moment()

    def _processes(self) -> dict[psutil.Process, str]:
        found = {self._router: "router"}
        for process in self._pool.ray.processes():
            role = role_of(process)
            if role == "replica":
                role = "replica, never killed" if process in self._kept else "replica, until it is killed"
            if role is not None:
                found[process] = role
        return found

    async def _note_moment(self) -> None:
        gaps, self._seen = self.found.tally.gaps_s[self._seen :], len(self.found.tally.gaps_s)
        loads = [load.load for load in await self._pool.client.loads() if load.state == READY]
        num_rows = sum(load.max_rows for load in loads)
        moment = Moment(
            at_s=time.monotonic(),
            gap_p50_s=at(0.5, gaps),
            gap_p99_s=at(0.99, gaps),
            occupancy=sum(load.running for load in loads) / num_rows if num_rows else 0.0,
            load_average=os.getloadavg()[0],
            busy=psutil.cpu_percent() / 100,
        )
        self.found.moments.append(moment)
        if len(self.found.moments) % 6 == 0:
            print(self.line(moment), flush=True)

    def line(self, moment: Moment) -> str:
        """For a log."""
        tally = self.found.tally
        rss = {
            role: [round(life.readings[-1].rss / 2**20) for life in self.found.vitals.of(role)][:2]
            for role in ("router", "replica, never killed", "Serve's controller")
        }
        return (
            f"{tally.complete} answers, {tally.left} left, {tally.slow} slow, {tally.moved} moved, {tally.refused} refused, {tally.lost} lost, "
            f"{tally.duplicated} doubled, {tally.changed} changed; {len(self.found.whole_s)} kills; gaps p50 "
            f"{1000 * moment.gap_p50_s:.0f} p99 {1000 * moment.gap_p99_s:.0f} ms; rows {moment.occupancy:.2f}, busy "
            f"{moment.busy:.2f}, load average {moment.load_average:.1f}; MiB {rss} {tally.problems[:2] or ''}"
        )

    async def _left(self, timeout_s: float = 10.0) -> list[str]:
        """What is held for clients that are gone: asked again for a while, since cancels take their time."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            left = [held for load in await self._pool.client.loads() if (held := _held(load))]
            if not left or time.monotonic() > give_up_s:
                return left
            await asyncio.sleep(0.2)

    async def _idle_tasks(self) -> dict[str, int]:
        """Once what is idle has settled."""
        await asyncio.sleep(2.0)
        vitals = Vitals(self.found.vitals._ports)
        kept = sorted(self._kept, key=lambda process: process.pid)
        await vitals.take({self._router: "router", **dict.fromkeys(kept, "replica")})
        names = {self._router: "router", **{one: f"replica {number}" for number, one in enumerate(kept)}}
        return {names[process]: life.readings[-1].tasks or 0 for process, life in vitals.lives.items()}


def _held(load: control_pb2.ReplicaLoad) -> str:
    """Empty if nothing is."""
    counts = (load.router_streams, load.router_outstanding_tokens, load.load.running, load.load.waiting)
    return f"{load.replica}: streams, outstanding tokens, running, waiting {counts}" if any(counts) else ""


async def run_soak(plan: SoakPlan) -> Soaked:
    """The whole of it, on one node beside the head."""
    ports = metrics_ports()
    router = {"metrics_listen": f"127.0.0.1:{ports[-1]}"}
    async with cluster_pool(num_nodes=1, router=router, dead_node=PATIENT) as pool:
        return await Soak(plan, pool, ports).run(ports[0])
