"""The policy that Serve calls, over a real router, without Serve."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import pytest

from cluster.autoscale.policy import RouterLoadPolicy
from cluster.config import ReplicaConfig
from protos import control_pb2, control_pb2_grpc
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, script_pool, start_replica
from tests.fakes.waiting import until


def policy_for(address: str, **scaling: object) -> RouterLoadPolicy:
    values = {"decide_every_s": 0.2, "down_after_s": 1.0, "to_zero_after_s": 1.0, "max_replicas": 4, **scaling}
    return RouterLoadPolicy(values, {"routers": [address]}, "")


def _is_heard(policy: RouterLoadPolicy) -> bool:
    return bool(policy._watch.reports)


def wanted(policy: RouterLoadPolicy, current: int) -> int:
    return policy(SimpleNamespace(target_num_replicas=current))[0]


async def test_load_on_a_replica_raises_the_number_and_quiet_lowers_it() -> None:
    knobs = ScriptKnobs(step_s=0.01, max_rows=4)
    async with script_pool(1, knobs=knobs) as pool:
        policy = policy_for(pool.router.address)
        asks = [asyncio.create_task(pool.client.generate([5, 6, i], max_tokens=200)) for i in range(6)]
        await until(lambda: wanted(policy, 1) > 1, 5)
        await asyncio.gather(*asks)
        await until(lambda: wanted(policy, 3) == 1, 10)


async def test_without_a_router_that_answers_nothing_changes() -> None:
    policy = policy_for("127.0.0.1:9")
    await asyncio.sleep(0.5)
    assert [wanted(policy, current) for current in (0, 2, 5)] == [0, 2, 5]


async def test_a_policy_that_another_has_replaced_asks_no_more() -> None:
    async with script_pool(1) as pool:
        policy = policy_for(pool.router.address)
        thread = policy._watch.thread
        await until(partial(_is_heard, policy), 5)
        assert thread.is_alive()
        del policy
        gc.collect()
        await until(lambda: not thread.is_alive(), 5)


async def test_a_pool_that_may_be_empty_begins_with_one_replica() -> None:
    async with script_pool(0) as pool:
        policy = policy_for(pool.router.address, min_replicas=0)
        await until(lambda: wanted(policy, 0) == 1, 5)
        await until(lambda: wanted(policy, 1) == 0, 5)


async def test_a_request_without_a_replica_is_held_counted_and_answered_once_one_comes() -> None:
    async with script_pool(0, router=replace(FAST, wait_for_replica_s=30.0)) as pool:
        policy = policy_for(pool.router.address, min_replicas=0)
        ask = asyncio.create_task(pool.client.generate([5, 6, 7], max_tokens=3))
        await until(lambda: wanted(policy, 0) == 1, 5)
        async with grpc.aio.insecure_channel(pool.router.address) as channel:
            loads = await control_pb2_grpc.ControlServiceStub(channel).GetLoads(control_pb2.GetLoadsRequest())
        assert [one.requests for one in loads.held] == [1]
        assert not ask.done()
        replica = await start_replica(_announcing(pool.router.address))
        try:
            assert len((await ask).choices[0].token_ids) == 3
            await until(lambda: not pool.router.pool.held(), 2)
        finally:
            await replica.stop()


async def test_a_model_that_was_there_is_waited_for_and_one_that_never_was_is_not_found() -> None:
    async with script_pool(1, router=replace(FAST, wait_for_replica_s=0.3), knobs=ScriptKnobs(model="kept")) as pool:
        first = await start_replica(_announcing(pool.router.address), ScriptKnobs(model="gone"))
        await until(lambda: pool.num_ready == 2, 10)
        await pool.client.generate([5, 6], model="gone", max_tokens=2)
        await first.stop()
        await until(lambda: pool.num_ready == 1, 10)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await pool.client.generate([5, 6], model="gone", max_tokens=2)
        with pytest.raises(Exception, match="NOT_FOUND"):
            await pool.client.generate([5, 6], model="never", max_tokens=2)


def _announcing(router: str) -> ReplicaConfig:

    return ReplicaConfig(routers=(router,), announce_period_s=0.2)
