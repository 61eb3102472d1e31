"""FaultService: where it is offered, and what it does to a replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, CallError, InternalError
from cluster.config import ReplicaConfig
from protos import fault_pb2, fault_pb2_grpc
from tests.fakes.replica_process import ENGINE_FAILED, replica_process
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import ONE_TRY, start_replica
from worker.faults import Faults, PromptFault

PROMPT = (7, 8, 9)
OFFERED = ReplicaConfig(enable_fault_injection=True)


@contextlib.asynccontextmanager
async def fault_stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield fault_pb2_grpc.FaultServiceStub(channel)


def on_prompt(kind: str, **values: Any) -> fault_pb2.InjectRequest:
    faults: dict[str, Any] = {kind: fault_pb2.PromptFault(prompt_token_ids=PROMPT, **values)}
    return fault_pb2.InjectRequest(**faults)


@pytest.mark.parametrize(
    "config",
    [
        ReplicaConfig(),
        ReplicaConfig(enable_fault_injection=True, listen="0.0.0.0:0", advertise="localhost", insecure=True),
    ],
)
async def test_it_is_unimplemented_without_the_flag_and_where_others_could_reach_it(config: ReplicaConfig) -> None:
    one = await start_replica(config)
    async with fault_stub(f"127.0.0.1:{one.server.address.rpartition(':')[2]}") as stub:
        for call in (stub.Inject(on_prompt("kill")), stub.Clear(fault_pb2.ClearRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await one.stop()


async def test_a_request_without_a_fault_is_refused() -> None:
    bad = (
        fault_pb2.InjectRequest(),
        fault_pb2.InjectRequest(hang_engine=fault_pb2.HangFault()),
        fault_pb2.InjectRequest(slow_steps=fault_pb2.SlowFault(factor=0.5)),
        fault_pb2.InjectRequest(nan_row=fault_pb2.PromptFault()),
    )
    one = await start_replica(OFFERED)
    async with fault_stub(one.server.address) as stub:
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Inject(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await one.stop()


async def test_a_nan_row_ends_its_request_alone() -> None:
    one = await start_replica(OFFERED)
    async with fault_stub(one.server.address) as stub, AsyncGraphpoolClient(one.server.address, ONE_TRY) as client:
        await stub.Inject(on_prompt("nan_row", after_tokens=3, times=1))
        other = asyncio.create_task(client.generate((1, 2), max_tokens=40, temperature=0))
        with pytest.raises(InternalError):
            await client.generate(PROMPT, max_tokens=40)
        assert (await other).token_ids == script((1, 2), 0, 0, 40)
        assert len((await client.generate(PROMPT, max_tokens=40)).token_ids) == 40
    await one.stop()


async def test_slow_steps_take_longer_until_they_are_cleared() -> None:
    one = await start_replica(OFFERED, ScriptKnobs(step_s=0.002))
    loop = asyncio.get_running_loop()
    async with fault_stub(one.server.address) as stub, AsyncGraphpoolClient(one.server.address, ONE_TRY) as client:
        await stub.Inject(fault_pb2.InjectRequest(slow_steps=fault_pb2.SlowFault(factor=10)))
        started_s = loop.time()
        await client.generate(PROMPT, max_tokens=10)
        slow_s = loop.time() - started_s
        await stub.Clear(fault_pb2.ClearRequest())
        started_s = loop.time()
        await client.generate(PROMPT, max_tokens=10)
        assert slow_s > 0.15
        assert loop.time() - started_s < slow_s
    await one.stop()


@pytest.mark.parametrize("kind", ["hang_engine", "stall_mailbox"])
async def test_an_engine_that_stands_still_fails_its_replica(kind: str) -> None:
    one = await start_replica(OFFERED)
    async with fault_stub(one.server.address) as stub, AsyncGraphpoolClient(one.server.address, ONE_TRY) as client:
        fault: dict[str, Any] = {kind: fault_pb2.HangFault(duration_s=30)}
        await stub.Inject(fault_pb2.InjectRequest(**fault))
        with pytest.raises(CallError):
            await client.generate(PROMPT, max_tokens=40)
        await stub.Clear(fault_pb2.ClearRequest())
    await asyncio.sleep(0.2)
    assert len(one.failures) == 1
    await one.stop()


@pytest.mark.parametrize(
    ("request_", "exit_code"),
    [
        (fault_pb2.InjectRequest(exit=fault_pb2.ExitFault(code=3)), 3),
        (on_prompt("kill", after_tokens=5), -9),
        (on_prompt("crash_engine", after_tokens=5), ENGINE_FAILED),
    ],
    ids=["exit", "kill", "crash"],
)
async def test_a_process_dies_as_it_is_told_to(request_: fault_pb2.InjectRequest, exit_code: int) -> None:
    async with (
        replica_process({"enable_fault_injection": True}, {"step_s": 0.01}) as process,
        fault_stub(process.address) as stub,
        AsyncGraphpoolClient(process.address, ONE_TRY) as client,
    ):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Inject(request_)
        with pytest.raises(CallError):
            await client.generate(PROMPT, max_tokens=100)
        assert await asyncio.wait_for(process.process.wait(), 20) == exit_code


async def test_a_blocked_event_loop_answers_nothing_and_then_goes_on() -> None:
    async with (
        replica_process({"enable_fault_injection": True}) as process,
        fault_stub(process.address) as stub,
        AsyncGraphpoolClient(process.address, ONE_TRY) as client,
    ):
        await stub.Inject(fault_pb2.InjectRequest(block_event_loop=fault_pb2.HangFault(duration_s=0.6)))
        await asyncio.sleep(0.1)
        started_s = asyncio.get_running_loop().time()
        assert len((await client.generate(PROMPT, max_tokens=3)).token_ids) == 3
        assert asyncio.get_running_loop().time() - started_s > 0.3


def test_a_fault_on_a_prompt_happens_so_many_times() -> None:
    faults = Faults()
    faults.on_prompt(PromptFault("nan", PROMPT, after_tokens=2, times_left=2))
    met = [faults.meets("nan", (*PROMPT, 4), tokens) for tokens in (0, 1, 2, 3, 4)]
    assert met == [False, False, True, True, False]
    assert not faults.meets("kill", PROMPT, 9)
    assert not faults.meets("nan", PROMPT[:2], 9)
