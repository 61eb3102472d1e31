"""A router and replicas with scripted engines in this process, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig, ReplicaConfig, RouterConfig
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from cluster.router.server import RouterServer
from protos import control_pb2
from tests.fakes.replica_process import ReplicaProcess, spawn_replica
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from tests.fakes.waiting import until
from worker.errors import WorkerError

FAST = RouterConfig(
    listen="127.0.0.1:0",
    wait_for_replica_s=0.5,
    wait_to_resume_s=5.0,
    announce_period_s=0.2,
    reconnect_max_s=0.5,
    canary_timeout_s=10.0,
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
    processes: list[ReplicaProcess] = field(default_factory=list)

    @property
    def states(self) -> dict[str, int]:
        """Of every replica the router knows, by name."""
        return {load.replica: load.state for load in self.router.pool.loads()}

    @property
    def num_ready(self) -> int:
        return list(self.states.values()).count(control_pb2.REPLICA_STATE_READY)

    @property
    def is_trying(self) -> bool:
        """Whether a request runs alone on a replica, to find out whether it ends that one too."""
        return any(stream.is_on_trial for link in self.router._membership.links for stream in link._streams.values())

    async def wait_idle(self) -> None:
        """Until the router has heard that nothing is left of any request; it knows a load as it was up to a report ago."""
        await until(lambda: not any(_is_busy(load) for load in self.router.pool.loads()))

    async def spawn(self, name: str, config: Mapping[str, object] | None = None, /, **knobs: object) -> ReplicaProcess:
        """One more replica, as a process of its own that ends with the pool; returns when it is ready."""
        process = await spawn_replica({"routers": [self.router.address], "name": name, **(config or {})}, knobs)
        self.processes.append(process)
        await until(lambda: self._is_ready(process.address), 60)
        return process

    def _is_ready(self, address: str) -> bool:
        """Counting would not do: one that was killed just now may count still."""
        ready = control_pb2.REPLICA_STATE_READY
        return any(load.address == address and load.state == ready for load in self.router.pool.loads())


def _is_busy(load: control_pb2.ReplicaLoad) -> bool:
    here = load.router_streams + load.router_outstanding_tokens
    return here + load.load.running + load.load.waiting > 0


async def start_replica(
    config: ReplicaConfig | None = None, knobs: ScriptKnobs | None = None, text: ScriptText | None = None
) -> ScriptReplica:
    """Start one; the caller stops it."""
    events = EventFanout()
    engine = ScriptEngine(events, knobs)
    failures: list[WorkerError] = []
    server = ReplicaServer(
        config or ReplicaConfig(),
        engine,
        text or ScriptText(),
        events=events,
        on_failure=failures.append,
        faults=engine.faults,
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
    pool = ScriptPool(server, replicas, client)
    try:
        for _ in range(num_replicas):
            config = replace(replica or ReplicaConfig(), routers=(server.address,))
            replicas.append(await start_replica(config, replace(knobs or ScriptKnobs())))
        if num_replicas:
            await server.wait_ready(num_replicas, timeout_s=30)
        yield pool
    finally:
        await client.close()
        for process in pool.processes:
            await process.kill()
        for one in replicas:
            await one.stop()
        await server.stop()
