"""How replicas and routers find each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import AsyncGraphpoolClient
from cluster.client.endpoints import Endpoints
from cluster.config import Keepalive, ReplicaConfig, RouterConfig
from cluster.router.server import RouterServer
from protos import control_pb2, generation_pb2, generation_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import FAST, ONE_TRY, script_pool, start_replica
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
READY = control_pb2.REPLICA_STATE_READY


def free_port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_a_router_takes_replicas_that_do_not_announce_themselves() -> None:
    one = await start_replica()
    async with script_pool(0, router=replace(FAST, replicas=(one.server.address,))) as pool:
        await pool.router.wait_ready(timeout_s=20)
        whole = await pool.client.generate(PROMPT, max_tokens=5, seed=1)
    await one.stop()
    assert whole.token_ids == script(PROMPT, 1, 0, 5)


async def test_a_configured_replica_may_start_later_and_come_back() -> None:
    probe = await start_replica()
    address = probe.server.address
    await probe.stop()
    async with script_pool(0, router=replace(FAST, replicas=(address,))) as pool:
        assert list(pool.states.values()) == [control_pb2.REPLICA_STATE_STARTING]
        for _ in range(2):
            one = await start_replica(ReplicaConfig(listen=address))
            await pool.router.wait_ready(timeout_s=20)
            assert (await pool.client.generate(PROMPT, max_tokens=2)).token_ids
            await one.stop()
            await until(lambda: pool.num_ready == 0)


async def test_a_replica_that_is_both_configured_and_announced_counts_once() -> None:
    one = await start_replica()
    async with script_pool(
        0, router=replace(FAST, replicas=(f"localhost:{free_port_of(one.server.address)}",))
    ) as pool:
        one.server.announce_to([pool.router.address])
        await pool.router.wait_ready(timeout_s=20)
        await asyncio.sleep(0.5)
        assert len(pool.router.pool.loads()) == 1
        assert (await pool.client.generate(PROMPT, max_tokens=2)).token_ids
        await one.stop()


async def test_two_routers_share_a_replica_and_see_each_others_load() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.01)) as first, script_pool(0) as second:
        for one in first.replicas:
            one.server.announce_to([first.router.address, second.router.address])
        await second.router.wait_ready(2, timeout_s=20)
        stream = first.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        busy = next(load.replica for load in first.router.pool.loads() if load.router_streams)
        await asyncio.sleep(0.4)
        answers = [await second.client.generate(PROMPT, max_tokens=2) for _ in range(4)]
        stream.cancel()
    assert busy not in {answer.execution.replica for answer in answers if answer.execution}


async def test_a_replica_that_nobody_hears_of_any_more_is_forgotten() -> None:
    async with script_pool(0) as pool:
        one = await pool.spawn("gone")
        await one.kill()
        await until(lambda: pool.states == {}, 5)


async def test_an_announcement_of_a_replaced_process_is_refused() -> None:
    async with script_pool(1) as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        server = pool.replicas[0].server
        stub = replica_pb2_grpc.MembershipServiceStub(channel)
        late = replica_pb2.AnnounceRequest(
            replica=server.name, address="127.0.0.1:9", incarnation="000000000000-0", state=READY
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Announce(late)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [load.address for load in pool.router.pool.loads()] == [server.address]
        assert (await pool.client.generate(PROMPT, max_tokens=2)).token_ids


async def test_an_announced_address_where_somebody_else_answers_is_not_used() -> None:
    async with script_pool(1) as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        stub = replica_pb2_grpc.MembershipServiceStub(channel)
        impostor = replica_pb2.AnnounceRequest(
            replica="impostor", address=pool.replicas[0].server.address, incarnation="zzz", state=READY
        )
        response = await stub.Announce(impostor)
        await asyncio.sleep(0.4)
        assert pool.states["impostor"] != READY
    assert response.router == pool.router.name
    assert response.next_s == pytest.approx(0.2)


async def test_a_replica_announces_to_routers_that_start_after_it() -> None:
    early = RouterServer(FAST)
    await early.start()
    address = early.address
    await early.stop()
    one = await start_replica(ReplicaConfig(routers=(address,), announce_period_s=0.2))
    late = RouterServer(replace(FAST, listen=address))
    await late.start()
    await late.wait_ready(timeout_s=20)
    await one.stop()
    await late.stop()


async def test_a_taken_port_is_an_os_error() -> None:
    async with script_pool(1) as pool:
        with pytest.raises(OSError, match="cannot listen"):
            await RouterServer(replace(FAST, listen=pool.router.address)).start()
        with pytest.raises(OSError, match="cannot listen"):
            await start_replica(ReplicaConfig(listen=pool.router.address))


async def test_loads_tell_what_each_replica_does() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.01)) as pool:
        stream = pool.client.stream((1,) * 10, max_tokens=2000)
        await anext(stream)
        placed = next(load for load in pool.router.pool.loads() if load.router_streams)
        assert 1900 < placed.router_outstanding_tokens < 2000
        await until(lambda: sorted(load.load.running for load in pool.router.pool.loads()) == [0, 1])
        loads = await pool.client.loads()
        assert {load.state for load in loads} == {READY}
        assert all(load.load.steps >= 2 and len(load.load.tiers) == 4 for load in loads)
        stream.cancel()
        await until(lambda: sum(load.router_outstanding_tokens for load in pool.router.pool.loads()) == 0)


async def test_work_spreads_evenly_over_equal_replicas() -> None:
    async with script_pool(4, knobs=ScriptKnobs(step_s=0.01)) as pool:
        streams = [pool.client.stream(PROMPT, max_tokens=500) for _ in range(40)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        spread = [load.router_streams for load in pool.router.pool.loads()]
        for stream in streams:
            stream.cancel()
    assert spread == [10, 10, 10, 10]


async def test_a_quiet_stream_survives_its_keepalive_pings() -> None:
    quick = Keepalive(time_s=0.3, timeout_s=0.3, min_ping_interval_s=0.2)
    router, replica = replace(FAST, keepalive=quick), ReplicaConfig(keepalive=quick)
    async with script_pool(1, router=router, replica=replica, knobs=ScriptKnobs(stall_s=60, is_preparing=True)) as pool:
        options = [
            ("grpc.keepalive_time_ms", 300),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        pool.replicas[0].engine.knobs.is_hanging = True
        client = AsyncGraphpoolClient(pool.router.address, ONE_TRY)
        client._endpoints = Endpoints(
            (pool.router.address,), lambda address: grpc.aio.insecure_channel(address, options=options)
        )
        answer = asyncio.create_task(client.generate(PROMPT, max_tokens=3, seed=1))
        await asyncio.sleep(2.5)
        pool.replicas[0].engine.knobs.is_hanging = False
        assert (await answer).token_ids == script(PROMPT, 1, 0, 3)
        await client.close()


async def test_a_peer_that_floods_a_router_with_pings_is_cut_off() -> None:
    options = [
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 50),
        ("grpc.http2.ping_timeout_ms", 1000),
    ]
    async with script_pool(1, knobs=ScriptKnobs(stall_s=60, is_preparing=True)) as pool:
        pool.replicas[0].engine.knobs.is_hanging = True
        patient = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=3, seed=1))
        async with grpc.aio.insecure_channel(pool.router.address, options=options) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 20)
        pool.replicas[0].engine.knobs.is_hanging = False
        assert (await patient).token_ids == script(PROMPT, 1, 0, 3)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "pings" in (caught.value.details() or "")


def test_the_default_router_is_on_loopback_with_a_budget_of_three() -> None:
    config = RouterConfig()
    assert (config.listen, config.resume_budget) == ("127.0.0.1:50050", 3)


async def test_an_idle_client_may_ping_as_often_as_is_configured() -> None:
    often = Keepalive(time_s=0.3, timeout_s=2.0, min_ping_interval_s=0.2)
    async with script_pool(1, router=replace(FAST, keepalive=often)) as pool:
        options = [
            ("grpc.keepalive_time_ms", 300),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        async with grpc.aio.insecure_channel(pool.router.address, options=options) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            await asyncio.sleep(2.5)
            assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_connection_past_its_age_takes_no_new_calls_and_finishes_what_it_has() -> None:
    router = replace(FAST, max_connection_age_s=0.5, connection_grace_s=30.0)
    async with script_pool(1, router=router, knobs=ScriptKnobs(step_s=0.01)) as pool:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(pool.router.address, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT))
            request.sampling.max_tokens, request.sampling.seed = 400, 4
            call = stub.GenerateStream(request)
            pieces = aiter(call)
            received = list((await anext(pieces)).choices[0].token_ids)
            await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, 3.0)
            async for piece in pieces:
                received += piece.choices[0].token_ids
    assert tuple(received) == script(PROMPT, 4, 0, 400)


async def test_a_replica_knows_when_a_router_sends_it_requests() -> None:
    alone = await start_replica()
    try:
        assert not await alone.server.wait_routed(0.3)
        async with script_pool(0) as pool:
            alone.server.announce_to((pool.router.address,))
            assert await alone.server.wait_routed(10)
            await until(lambda: pool.num_ready == 1)
    finally:
        await alone.stop()


async def test_a_replica_waits_for_each_of_its_routers_and_not_for_one_that_is_away() -> None:
    alone = await start_replica()
    try:
        async with script_pool(0) as first, script_pool(0) as second:
            alone.server.announce_to((first.router.address, second.router.address, "127.0.0.1:9"))
            assert await alone.server.wait_routed(15)
            # A router learns that the canary has ended a moment after the replica has sent its end.
            await until(lambda: first.num_ready == second.num_ready == 1, 1.0)
    finally:
        await alone.stop()
