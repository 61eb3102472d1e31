"""Takes a Ray cluster apart while it answers: replicas, nodes, Serve's controller, the head's GCS.

    python -m tests.chaos.cluster_campaign --restarts 3 --cycles 2 --seed 7

Three nodes on this machine, of which the head holds no replica; a router beside them. Replicas play a script, so that every
token of every answer is known beforehand.
"""

from __future__ import annotations

from tests.chaos.cluster_pool import ClusterPool, cluster_pool  # first: it sets what gRPC reads when it is imported

import argparse  # isort: skip
import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cluster.autoscale.config import ScalingConfig
from tests.chaos.cluster_events import ClusterLoad, Event
from tests.fakes.ray_cluster import missing

NUM_REPLICAS = 3
SCALING = ScalingConfig(
    min_replicas=1,
    max_replicas=NUM_REPLICAS,
    target_occupancy=1.0,
    decide_every_s=0.5,
    down_after_s=4.0,
    replica_start_s=30.0,
)
CALM_S = 5.0
MAX_TOKENS = 160
FEW, MANY = 1, 12
"""Clients that one replica of few rows can answer, and clients for which it takes three."""
FEW_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign does."""

    restarts: int = 3
    """Rolling restarts."""
    cycles: int = 2
    """From one replica to three and back."""
    kills: int = 1
    """Nodes, controllers and heads, each."""
    gcs_down_s: float = 5.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("restarts", "cycles", "kills"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")
        if not 0 <= self.gcs_down_s < 60:
            raise ValueError(f"gcs_down_s is {self.gcs_down_s}, must be in [0, 60): nodes give up a head after 60 s")


@dataclass(slots=True)
class Campaign:
    """One run over a pool."""

    plan: Plan
    pool: ClusterPool
    load: ClusterLoad
    events: list[Event] = field(default_factory=list)

    async def run(self) -> list[Event]:
        """Everything of the plan, in turn; the last event is what happened between them.

        What is broken leaves rows for all: a gap is what the loss costs, not a wait for others to end.
        """
        await self.pool.deploy(scaling=SCALING, max_rows=FEW_ROWS)
        await self.pool.whole(1)
        self.load.resize(FEW)
        for _ in range(self.plan.cycles):
            await self.scale()
        before = await self.pool.ready()
        await self.pool.deploy(num_replicas=NUM_REPLICAS)
        await self.pool.whole(NUM_REPLICAS, without=before)
        self.load.resize(MANY)
        await self.nothing()
        for _ in range(self.plan.restarts):
            await self.restart()
        for _ in range(self.plan.kills):
            await self.lose_node()
            await self.lose_controller()
            await self.lose_head()
        await self.load.end()
        self._over(self.load.between)
        return self.events

    async def nothing(self) -> None:
        """To compare with."""
        async with self.load.during("nothing") as event:
            await asyncio.sleep(CALM_S)
        event.whole_s = 0.0
        self._over(event)

    async def scale(self) -> None:
        """Load rises and falls."""
        async with self.load.during("load rises: 1 to 3 replicas") as event:
            self.load.resize(MANY)
            await self.pool.whole(NUM_REPLICAS)
        self._over(event)
        async with self.load.during("load falls: 3 to 1 replicas") as event:
            self.load.resize(FEW)
            await self.pool.whole(1)
        self._over(event)

    async def restart(self) -> None:
        """Every replica is replaced, one after the other."""
        before = await self.pool.ready()
        async with self.load.during("rolling restart of 3 replicas") as event:
            await self.pool.deploy(num_replicas=NUM_REPLICAS)
            await self.pool.whole(NUM_REPLICAS, without=before)
        self._over(event)

    async def lose_node(self) -> None:
        """Its replicas come back on the other node; then there is a new one."""
        async with self.load.during("node killed") as event:
            await self._lose(self.pool.kill_fullest_node)
        self._over(event)
        await self.pool.ray.call(self.pool.ray.add_node)

    async def lose_controller(self) -> None:
        """Together with a replica, which only the next controller replaces."""
        ray = self.pool.ray
        async with self.load.during("controller and a replica killed") as event:
            controller = await ray.call(ray.controller)
            assert controller is not None
            controller.kill()
            await self._lose(lambda: ray.call(ray.kill_replica))
        assert await ray.call(ray.controller) != controller
        self._over(event)

    async def lose_head(self) -> None:
        """The GCS is away for a while; once it is back, a replica that is lost is replaced."""
        ray = self.pool.ray
        async with self.load.during(f"GCS killed, back after {self.plan.gcs_down_s:g} s") as event:
            await ray.call(ray.kill_gcs)
            await asyncio.sleep(self.plan.gcs_down_s)
            await ray.call(ray.start_gcs)
            await self.pool.whole(NUM_REPLICAS)
        self._over(event)
        async with self.load.during("replica killed after that") as event:
            await self._lose(lambda: ray.call(ray.kill_replica))
        self._over(event)

    async def _lose(self, kill: Callable[[], Awaitable[int]]) -> None:
        """Kill so many, and wait until as many are ready as before, so many of them new."""
        before = await self.pool.ready()
        num_lost = await kill()
        await self.pool.until(
            lambda ready: len(ready) == NUM_REPLICAS and len(ready - before) >= num_lost, timeout_s=120.0
        )

    def _over(self, event: Event) -> None:
        self.events.append(event)
        print(event.line(), flush=True)


async def run(plan: Plan) -> list[Event]:
    """The whole campaign."""
    async with cluster_pool() as pool:
        load = ClusterLoad(pool.client, seed=plan.seed, max_tokens=MAX_TOKENS)
        return await Campaign(plan, pool, load).run()


def plan_from(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> Plan:
    """By the command line; exits where there can be no cluster."""
    parser.add_argument("--restarts", type=int, default=3, help="rolling restarts; 20 in a full run")
    parser.add_argument("--cycles", type=int, default=2, help="from 1 replica to 3 and back; 10 in a full run")
    parser.add_argument("--kills", type=int, default=1, help="of a node, of the controller and of the GCS")
    parser.add_argument("--gcs-down-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args(arguments)
    if (problem := missing()) is not None:
        parser.error(problem)
    print(f"seed {options.seed}", flush=True)
    return Plan(**vars(options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    events = asyncio.run(run(plan_from(parser)))
    return int(not all(event.is_flawless for event in events))


if __name__ == "__main__":
    sys.exit(main())
