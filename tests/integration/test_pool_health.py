"""grpc.health.v1 and what else servers say about themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig
from tests.fakes.script_pool import ONE_TRY, script_pool, start_replica
from tests.fakes.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "graphpool.v1.GenerationService")


async def check(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


async def watch(channel: grpc.aio.Channel, service: str) -> AsyncIterator[int]:
    async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
        yield response.status


@pytest.mark.parametrize("service", NAMES)
async def test_watching_a_router_shows_every_change_of_readiness(service: str) -> None:
    async with script_pool(0) as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        seen = watch(channel, service)
        changes = [await anext(seen)]
        one = await start_replica(ReplicaConfig(routers=(pool.router.address,)))
        changes.append(await asyncio.wait_for(anext(seen), 5))
        drain = asyncio.create_task(one.server.drain(1))
        changes.append(await asyncio.wait_for(anext(seen), 5))
        await drain
        await one.stop()
    assert changes == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_router_serves_while_one_replica_of_several_is_ready() -> None:
    async with script_pool(2) as pool:
        assert [await check(pool.router.address, name) for name in NAMES] == [SERVING, SERVING]
        await pool.replicas[0].server.drain(1)
        await until(lambda: pool.num_ready == 1)
        assert [await check(pool.router.address, name) for name in NAMES] == [SERVING, SERVING]
        await pool.replicas[1].server.drain(1)
        await until(lambda: pool.num_ready == 0)
        assert [await check(pool.router.address, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]


async def test_a_draining_router_ceases_to_serve() -> None:
    async with script_pool(1) as pool:
        await pool.client.drain(grace_s=0)
        assert [await check(pool.router.address, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]


async def test_a_replica_serves_until_it_drains_or_fails() -> None:
    async with script_pool(2) as pool:
        drained, failed = pool.replicas
        assert await check(drained.server.address, "") == SERVING
        await drained.server.drain(1)
        assert await check(drained.server.address, NAMES[1]) == NOT_SERVING
        failed.engine.stop()
        await until(lambda: bool(failed.failures))
        assert await check(failed.server.address, NAMES[1]) == NOT_SERVING


async def test_a_service_that_is_not_there_is_not_found() -> None:
    async with script_pool(0) as pool:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(pool.router.address, "nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_servers_say_who_they_are() -> None:
    async with script_pool(1) as pool:
        replica = pool.replicas[0].server
        async with AsyncGraphpoolClient(replica.address, ONE_TRY) as direct:
            mine, theirs = await pool.client.status(), await direct.status()
    assert (mine.server.role, mine.server.id, mine.server.model) == ("router", pool.router.name, "script")
    assert (theirs.server.role, theirs.server.id, theirs.server.model) == ("replica", replica.incarnation, "script")
    assert mine.server.uptime_s > 0
    assert [load.incarnation for load in mine.replicas] == [load.incarnation for load in theirs.replicas]
