"""A replica with a scripted engine as Ray Serve hosts it, and applications of them on one Ray, each beside a router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.private_ray import PrivateRay  # first: it sets what gRPC reads when it is imported

from cluster.autoscale.config import ScalingConfig  # isort: skip
from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig, RouterConfig, from_mapping
from cluster.router.server import RouterServer
from cluster.serve_app import APP_NAME, SERVE_LOGGING, PoolConfig, application_of, pool_config
from protos import control_pb2

READY = control_pb2.REPLICA_STATE_READY


class ServedScript:
    """See cluster.served_replica.ServedReplica."""

    async def __init__(self, config: dict[str, Any], knobs: dict[str, Any], drain_timeout_s: float) -> None:  # type: ignore[misc]
        from cluster.replica.events import EventFanout
        from cluster.replica.server import ReplicaServer
        from cluster.served_place import placed
        from cluster.served_replica import ROUTED_WITHIN_S
        from tests.fakes.script_engine import ScriptEngine, ScriptKnobs

        self._drain_timeout_s = drain_timeout_s
        events = EventFanout()
        self._engine = ScriptEngine(events, ScriptKnobs(**knobs))
        self._server = ReplicaServer(await placed(from_mapping(ReplicaConfig, config)), self._engine, events=events)
        await self._server.start()
        await self._server.wait_routed(ROUTED_WITHIN_S)

    async def reconfigure(self, changed: dict[str, Any]) -> None:
        self._drain_timeout_s = float(changed["drain_timeout_s"])
        self._server.announce_to(changed["routers"])

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
        surge: bool | None = False,
        num_cpus: float = 0.1,
        routers: tuple[str, ...] = (),
        **knobs: Any,
    ) -> None:
        """Make the application what it is to be, without waiting for it; no `routers` means the pool's own."""
        replica = ReplicaConfig(routers=routers or (self.router.address,), announce_period_s=0.2)
        config = PoolConfig(replica=replica, num_replicas=num_replicas, scaling=scaling, surge=surge)
        await self.ray.call(deploy_script, config, knobs, drain_timeout_s, num_cpus)

    async def running(self, num_replicas: int, timeout_s: float = 120.0) -> None:
        """Until so many replicas take requests, and Serve knows it."""
        async with asyncio.timeout(timeout_s):
            while len(self.ready) != num_replicas or not await self.ray.call(is_running):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def is_running() -> bool:
    """Whether Serve, too, knows that its replicas have started; until then it takes any of them away at once."""
    from ray import serve

    return bool(serve.status().applications[APP_NAME].status == "RUNNING")


def deploy_script(config: PoolConfig, knobs: dict[str, Any], drain_timeout_s: float, num_cpus: float = 0.1) -> None:
    """Make the application what it is to be, without waiting for it; needs a connection to Ray."""
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=SERVE_LOGGING)
    bound = scripted(replace(config, drain_timeout_s=drain_timeout_s), knobs, num_cpus)
    target = serve.RunTarget(bound, name=APP_NAME, route_prefix=None, logging_config=SERVE_LOGGING)
    serve.run_many([target], wait_for_applications_running=False)


def scripted(config: PoolConfig, knobs: dict[str, Any], num_cpus: float = 0.1) -> Any:
    """The application, with replicas that take next to nothing unless that is said."""
    config = replace(
        config, num_cpus=num_cpus, num_gpus=0, health_check_timeout_s=max(5.0, config.health_check_timeout_s)
    )
    return application_of(ServedScript, config, asdict(config.replica), knobs)


def app(values: dict[str, Any]) -> Any:
    """Application builder for Serve config files: `cluster.serve_app.app` with `knobs` in place of a worker."""
    return scripted(pool_config({name: value for name, value in values.items() if name != "knobs"}), values["knobs"])


def apply_config(values: dict[str, Any]) -> None:
    """What `serve deploy` does with a file that has these values as args; needs a connection to Ray."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": APP_NAME,
        "route_prefix": None,
        "import_path": "tests.fakes.served_script:app",
        "args": values,
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def delete_script() -> None:
    """Returns when its replicas are gone; needs a connection to Ray."""
    from ray import serve

    serve.delete(APP_NAME)


@contextlib.contextmanager
def ray_of_pools() -> Iterator[PrivateRay]:
    """A Ray for pools that come one after the other."""
    ray = PrivateRay(num_cpus=2, num_gpus=0)
    asyncio.run(ray.start())
    try:
        yield ray
    finally:
        asyncio.run(ray.stop())


@contextlib.asynccontextmanager
async def served_pool(router: RouterConfig, ray: PrivateRay) -> AsyncIterator[ServedPool]:
    """A router, and what is deployed for the length of a block; that is nothing yet."""
    server = RouterServer(replace(router, listen="127.0.0.1:0"))
    await server.start()
    try:
        async with AsyncGraphpoolClient(server.address) as client:
            yield ServedPool(ray, server, client)
    finally:
        await ray.call(delete_script)
        await server.stop()
