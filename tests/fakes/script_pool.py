"""A router and replicas with scripted engines in this process, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig, ReplicaConfig, RouterConfig
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from cluster.router.server import RouterServer
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from worker.errors import WorkerError

FAST = RouterConfig(
    listen="127.0.0.1:0", wait_for_replica_s=0.5, announce_period_s=0.2, reconnect_max_s=0.5, canary_timeout_s=10.0
)
ONE_TRY = ClientConfig(max_attempts=1)


@dataclass(slots=True)
class ScriptReplica:
    """One replica in this process."""

    server: ReplicaServer
    engine: ScriptEngine
    failures: list[WorkerError]

    async def stop(self) -> None:
        await self.server.stop()
        self.engine.stop()


@dataclass(slots=True)
class ScriptPool:
    """A router, its replicas and a client of the router that tries once."""

    router: RouterServer
    replicas: list[ScriptReplica]
    client: AsyncGraphpoolClient


async def start_replica(
    config: ReplicaConfig | None = None, knobs: ScriptKnobs | None = None, text: ScriptText | None = None
) -> ScriptReplica:
    """Start one; the caller stops it."""
    events = EventFanout()
    engine = ScriptEngine(events, knobs)
    failures: list[WorkerError] = []
    server = ReplicaServer(
        config or ReplicaConfig(), engine, text or ScriptText(), events=events, on_failure=failures.append
    )
    await server.start()
    return ScriptReplica(server, engine, failures)


@contextlib.asynccontextmanager
async def script_pool(
    num_replicas: int = 1,
    *,
    router: RouterConfig = FAST,
    replica: ReplicaConfig | None = None,
    knobs: ScriptKnobs | None = None,
) -> AsyncIterator[ScriptPool]:
    """A pool whose replicas are ready; each replica has its own copy of `knobs`."""
    server = RouterServer(router)
    await server.start()
    replicas: list[ScriptReplica] = []
    client = AsyncGraphpoolClient(server.address, ONE_TRY)
    try:
        for _ in range(num_replicas):
            config = replace(replica or ReplicaConfig(), routers=(server.address,))
            replicas.append(await start_replica(config, replace(knobs or ScriptKnobs())))
        if num_replicas:
            await server.wait_ready(num_replicas, timeout_s=10)
        yield ScriptPool(server, replicas, client)
    finally:
        await client.close()
        for one in replicas:
            await one.stop()
        await server.stop()
