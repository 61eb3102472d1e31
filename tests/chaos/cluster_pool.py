"""A Ray cluster of nodes that can be killed, Serve with scripted replicas on them, and a router process beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from tests.fakes.ray_cluster import DEAD_NODE, RayCluster  # first: it sets what gRPC reads when it is imported

from cluster.autoscale.config import ScalingConfig  # isort: skip
from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig, ReplicaConfig
from cluster.serve_app import PoolConfig, deploy
from protos import control_pb2
from tests.fakes.router_process import RouterProcess, spawn_router
from tests.fakes.served_script import deploy_script
from worker.config import WorkerConfig

READY = control_pb2.REPLICA_STATE_READY
QUICK: dict[str, object] = {"announce_period_s": 0.2, "reconnect_max_s": 0.5, "canary_timeout_s": 10.0}
"""A router whose pool changes often; what finds faults, and how long answers wait, is as in production."""
STEP_S = 0.02
ONE_TRY = ClientConfig(max_attempts=1)
"""What a client would try again counts as lost."""
DRAIN_TIMEOUT_S = 20.0
MOST_CPUS = 1.2
"""Of a replica that is to have a node for itself: nodes have two."""


@dataclass(slots=True)
class ClusterPool:
    """Everything that runs."""

    ray: RayCluster
    client: AsyncGraphpoolClient
    router: RouterProcess
    num_deployments: int = 0

    async def deploy(
        self,
        *,
        num_replicas: int = 1,
        max_rows: int = 16,
        step_s: float = STEP_S,
        scaling: ScalingConfig | None = None,
        metrics_listen: str = "",
        health_check_timeout_s: float = 5.0,
    ) -> None:
        """Make the application what it is to be, without waiting for it. Every call makes new replicas."""
        self.num_deployments += 1
        replica = ReplicaConfig(routers=(self.router.address,), announce_period_s=0.2, metrics_listen=metrics_listen)
        config = PoolConfig(
            replica=replica,
            num_replicas=num_replicas,
            scaling=scaling,
            health_check_timeout_s=health_check_timeout_s,
        )
        knobs = {"step_s": step_s, "max_rows": max_rows, "max_waiting": 256 + self.num_deployments}
        await self.ray.call(deploy_script, config, knobs, DRAIN_TIMEOUT_S)

    async def deploy_model(
        self, worker: WorkerConfig, *, num_replicas: int = 1, scaling: ScalingConfig | None = None
    ) -> None:
        """The same with replicas as they are in production, of which each has a node for itself."""
        self.num_deployments += 1
        config = PoolConfig(
            revision=str(self.num_deployments),
            worker=worker,
            replica=ReplicaConfig(routers=(self.router.address,), announce_period_s=0.2),
            num_replicas=num_replicas,
            scaling=scaling,
            num_cpus=MOST_CPUS,
            health_check_timeout_s=30.0,
        )
        await self.ray.call(deploy, config)

    async def ready(self) -> set[str]:
        """Incarnations of the replicas that take requests."""
        return {load.incarnation for load in await self.client.loads() if load.state == READY}

    async def whole(
        self, num_replicas: int, *, without: frozenset[str] | set[str] = frozenset(), timeout_s: float = 120.0
    ) -> set[str]:
        """Wait until exactly so many are ready, none of them one of `without`; returns them."""
        return await self.until(lambda ready: len(ready) == num_replicas and not ready & without, timeout_s)

    async def until(
        self, holds: Callable[[set[str]], bool], timeout_s: float = 60.0, *, look_every_s: float = 0.05
    ) -> set[str]:
        """Wait until that is so of those that are ready; returns them."""
        give_up_s = time.monotonic() + timeout_s
        while not holds(ready := await self.ready()):
            if time.monotonic() > give_up_s:
                states = [(load.replica, load.incarnation[:8], load.state) for load in await self.client.loads()]
                raise TimeoutError(f"after {timeout_s:g} s the router knows {states}")
            await asyncio.sleep(look_every_s)
        return ready

    async def kill_fullest_node(self) -> int:
        """See RayCluster; the one thread that talks to Ray does it."""
        return await self.ray.call(self.ray.kill_fullest_node)


@contextlib.asynccontextmanager
async def cluster_pool(
    *, num_nodes: int = 2, router: Mapping[str, object] | None = None, dead_node: Mapping[str, int] = DEAD_NODE
) -> AsyncIterator[ClusterPool]:
    """Nothing is deployed yet. `router` is what its config has beside QUICK."""
    process = await spawn_router({**QUICK, **(router or {})})
    ray = RayCluster(num_nodes=num_nodes, dead_node=dead_node)
    try:
        await ray.start()
        async with AsyncGraphpoolClient(process.address, ONE_TRY) as client:
            yield ClusterPool(ray, client, process)
    finally:
        await ray.stop()
        await process.kill()
