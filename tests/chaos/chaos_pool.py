"""Routers and replicas with scripted engines, each a process of its own, for breaking."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig
from protos import control_pb2, fault_pb2, fault_pb2_grpc
from tests.chaos.oracle import Question, Record, ask, watch
from tests.chaos.tcp_proxy import TcpProxy
from tests.fakes.replica_process import ReplicaProcess, spawn_replica
from tests.fakes.router_process import RouterProcess, spawn_router

QUICK: dict[str, object] = {
    "announce_period_s": 0.2,
    "reconnect_max_s": 0.5,
    "wait_for_replica_s": 10.0,
    "place_pause_max_s": 1.0,
}
"""A router whose pool changes often; what finds faults is as in production."""
PATIENT: dict[str, object] = {"stall_s": 5.0}
"""Steps of a busy machine may take a while; where a hang is to be found by the replica itself, less is given."""
ONE_TRY = ClientConfig(max_attempts=1)


@dataclass(slots=True)
class ChaosPool:
    """Everything that runs, and a client of the first router."""

    routers: list[RouterProcess]
    client: AsyncGraphpoolClient
    knobs: Mapping[str, object]
    replicas: dict[str, ReplicaProcess] = field(default_factory=dict)
    proxies: dict[str, TcpProxy] = field(default_factory=dict)
    """Between the router and each replica, if the pool has them; replicas do not announce themselves then."""

    async def spawn(self, name: str, **knobs: object) -> ReplicaProcess:
        """Start a replica, or its successor; it is not waited for."""
        routers = [router.address for router in self.routers]
        replica = self.replicas[name] = await spawn_replica(_replica(name, routers), {**self.knobs, **knobs})
        return replica

    async def loads(self) -> dict[str, control_pb2.ReplicaLoad]:
        """Of every replica the first router knows; of two processes of a name the ready one."""
        found: dict[str, control_pb2.ReplicaLoad] = {}
        for load in await self.client.loads():
            if found.get(load.replica) is None or load.state == control_pb2.REPLICA_STATE_READY:
                found[load.replica] = load
        return found

    async def num_ready(self) -> int:
        """Replicas that the first router places requests on."""
        return sum(load.state == control_pb2.REPLICA_STATE_READY for load in (await self.loads()).values())

    async def wait_ready(self, count: int, timeout_s: float = 60.0) -> float:
        """Until exactly so many are ready; returns how long it took."""
        started_s = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while await self.num_ready() != count:  # noqa: ASYNC110  # the router has no event for its clients
                await asyncio.sleep(0.02)
        return time.monotonic() - started_s

    async def inject(self, name: str, **fault: Any) -> None:
        """See FaultService; a replica that exits does not answer."""
        async with grpc.aio.insecure_channel(self.replicas[name].address) as channel:
            stub = fault_pb2_grpc.FaultServiceStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Inject(fault_pb2.InjectRequest(**fault), timeout=5.0)

    async def ask(self, question: Question, *, patience_s: float = 60.0, timeout_s: float | None = None) -> Record:
        """One streamed answer, checked."""
        async with ask(self.client, question, timeout_s=timeout_s) as stream:
            return await watch(question, stream, patience_s=patience_s)

    async def busiest(self) -> str:
        """The replica with the most streams of the first router."""
        loads = await self.loads()
        return max(loads, key=lambda name: loads[name].router_streams)

    async def serving(self, name: str, timeout_s: float = 30.0) -> None:
        """Until the replica answers at least one request."""
        async with asyncio.timeout(timeout_s):
            while not ((load := (await self.loads()).get(name)) and load.router_streams):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Until nothing is left of any request; a router knows a replica's load as it was up to a report ago."""
        async with asyncio.timeout(timeout_s):
            while any(_is_busy(load) for load in (await self.loads()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Kill everything."""
        await self.client.close()
        for process in (*self.replicas.values(), *self.routers):
            with contextlib.suppress(ProcessLookupError):
                await process.kill()
        for proxy in self.proxies.values():
            await proxy.stop()


@contextlib.asynccontextmanager
async def chaos_pool(
    num_replicas: int,
    *,
    num_routers: int = 1,
    router: Mapping[str, object] | None = None,
    prefix: tuple[str, ...] = (),
    client: ClientConfig = ONE_TRY,
    **knobs: object,
) -> AsyncIterator[ChaosPool]:
    """A pool whose replicas, `r0`, `r1`, ..., are ready. Everything is killed at the end."""
    config = {**QUICK, **(router or {})}
    routers = [await spawn_router(config, prefix=prefix) for _ in range(num_routers)]
    pool = ChaosPool(routers, AsyncGraphpoolClient(routers[0].address, client), {**PATIENT, **knobs})
    try:
        await asyncio.gather(*(pool.spawn(f"r{number}") for number in range(num_replicas)))
        await pool.wait_ready(num_replicas)
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def proxied_pool(
    num_replicas: int, *, router: Mapping[str, object] | None = None, **knobs: object
) -> AsyncIterator[ChaosPool]:
    """The same with a proxy between the router and each replica."""
    names = [f"r{number}" for number in range(num_replicas)]
    spawned = await asyncio.gather(*(spawn_replica(_replica(name, []), {**PATIENT, **knobs}) for name in names))
    proxies = {name: TcpProxy(replica.address) for name, replica in zip(names, spawned, strict=True)}
    for proxy in proxies.values():
        await proxy.start()
    addresses = [proxy.address for proxy in proxies.values()]
    process = await spawn_router({**QUICK, **(router or {}), "replicas": addresses})
    client = AsyncGraphpoolClient(process.address, ONE_TRY)
    pool = ChaosPool([process], client, knobs, dict(zip(names, spawned, strict=True)), proxies)
    try:
        await pool.wait_ready(num_replicas)
        yield pool
    finally:
        await pool.close()


def _is_busy(load: control_pb2.ReplicaLoad) -> bool:
    here = load.router_streams + load.router_outstanding_tokens
    return here + load.load.running + load.load.waiting > 0


def _replica(name: str, routers: list[str]) -> dict[str, object]:
    return {"routers": routers, "name": name, "enable_fault_injection": True, "announce_period_s": 0.2}
