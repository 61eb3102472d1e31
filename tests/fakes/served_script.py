"""A replica with a scripted engine as Ray Serve hosts it, and a Ray with an application of them beside a router."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.private_ray import PrivateRay  # first: it sets what gRPC reads when it is imported

from cluster.autoscale.config import ScalingConfig  # isort: skip
from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig, RouterConfig
from cluster.router.server import RouterServer
from cluster.serve_app import APP_NAME, DEPLOYMENT_NAME, SERVE_LOGGING, STOP_MARGIN_S, PoolConfig, replicas_of
from protos import control_pb2

READY = control_pb2.REPLICA_STATE_READY


class ServedScript:
    """See cluster.served_replica.ServedReplica."""

    async def __init__(self, config: ReplicaConfig, knobs: dict[str, Any], drain_timeout_s: float) -> None:  # type: ignore[misc]
        from cluster.replica.events import EventFanout
        from cluster.replica.server import ReplicaServer
        from cluster.served_replica import ROUTED_WITHIN_S, placed
        from tests.fakes.script_engine import ScriptEngine, ScriptKnobs

        self._drain_timeout_s = drain_timeout_s
        events = EventFanout()
        self._engine = ScriptEngine(events, ScriptKnobs(**knobs))
        self._server = ReplicaServer(placed(config), self._engine, events=events)
        await self._server.start()
        await self._server.wait_routed(ROUTED_WITHIN_S)

    async def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        await self._server.drain(self._drain_timeout_s)
        await self._server.stop()
        self._engine.stop()


@dataclass(slots=True)
class ServedPool:
    """A router in this process, and Serve with scripted replicas."""

    ray: PrivateRay
    router: RouterServer
    client: AsyncGraphpoolClient

    @property
    def ready(self) -> dict[str, str]:
        """Names of the replicas that take requests, and their incarnations."""
        return {one.replica: one.incarnation for one in self.router.pool.loads() if one.state == READY}

    async def deploy(
        self,
        *,
        num_replicas: int = 1,
        scaling: ScalingConfig | None = None,
        drain_timeout_s: float = 20.0,
        **knobs: Any,
    ) -> None:
        """Make the application what it is to be, without waiting for it."""
        replica = ReplicaConfig(routers=(self.router.address,), announce_period_s=0.2)
        config = PoolConfig(replica=replica, num_replicas=num_replicas, scaling=scaling)
        await self.ray.call(deploy_script, config, knobs, drain_timeout_s)


def deploy_script(config: PoolConfig, knobs: dict[str, Any], drain_timeout_s: float) -> None:
    """Make the application what it is to be, without waiting for it; needs a connection to Ray."""
    from ray import serve

    deployment = serve.deployment(
        ServedScript,
        name=DEPLOYMENT_NAME,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=1,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_timeout_s + STOP_MARGIN_S,
        health_check_period_s=1.0,
        health_check_timeout_s=max(5.0, config.health_check_timeout_s),
        **replicas_of(config),
    )
    serve.start(proxy_location="Disabled", logging_config=SERVE_LOGGING)
    bound = deployment.bind(config.replica, knobs, drain_timeout_s)
    target = serve.RunTarget(bound, name=APP_NAME, route_prefix=None, logging_config=SERVE_LOGGING)
    serve.run_many([target], wait_for_applications_running=False)


@contextlib.asynccontextmanager
async def served_pool(router: RouterConfig) -> AsyncIterator[ServedPool]:
    """Ray and a router; nothing is deployed yet."""
    server, ray = RouterServer(replace(router, listen="127.0.0.1:0")), PrivateRay(num_cpus=2, num_gpus=0)
    await server.start()
    try:
        await ray.start()
        async with AsyncGraphpoolClient(server.address) as client:
            yield ServedPool(ray, server, client)
    finally:
        await ray.stop()
        await server.stop()
