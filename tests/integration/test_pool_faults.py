"""Replicas that die, hang or leave, under requests."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from cluster.client import Answer, AsyncAnswerStream, AsyncGraphpoolClient, CallError, NotFound, Unavailable
from cluster.config import ReplicaConfig
from cluster.errors import ClusterError
from cluster.replica.lifecycle import State
from protos import control_pb2
from tests.fakes.replica_process import ENGINE_FAILED
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import FAST, ONE_TRY, script_pool, start_replica
from tests.fakes.waiting import until
from worker.errors import EngineDead, EngineStalled

PROMPT = (10, 20, 30)
NEVER_S = 3600.0


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    async with stream:
        return [piece async for piece in stream]


def ids(pieces: list[Answer]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


async def test_a_request_whose_replica_dies_before_its_first_token_is_answered_by_another() -> None:
    async with script_pool(0) as pool:
        # Two steps are the canary's.
        doomed = await pool.spawn("doomed", hang_after_steps=2, stall_s=NEVER_S)
        answer = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=20, seed=3))
        await until(lambda: pool.router.pool.loads()[0].router_streams == 1)
        await pool.spawn("other")
        await doomed.kill()
        whole = await answer
    assert whole.token_ids == script(PROMPT, 3, 0, 20)
    assert whole.execution is not None
    assert (whole.execution.replica, whole.execution.attempts) == ("other", 2)


async def test_a_request_whose_replica_dies_after_its_first_token_ends_unavailable_with_a_sentence() -> None:
    async with script_pool(0) as pool:
        doomed = await pool.spawn("doomed", step_s=0.01)
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await doomed.kill()
        with pytest.raises(Unavailable, match=r"replica doomed was lost after \d+ tokens of this answer"):
            await read(stream)


async def test_requests_on_other_replicas_do_not_notice_a_death() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.005)) as pool:
        doomed = await pool.spawn("doomed", step_s=0.005)
        streams = [pool.client.stream(PROMPT, max_tokens=200, seed=seed) for seed in range(12)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: [load.router_streams for load in pool.router.pool.loads()] == [6, 6])
        await asyncio.sleep(0.2)
        await doomed.kill()
        results = await asyncio.gather(*readers, return_exceptions=True)
    answered = [seed for seed, result in enumerate(results) if not isinstance(result, BaseException)]
    lost = [result for result in results if isinstance(result, BaseException)]
    assert len(answered) == len(lost) == 6
    assert all(isinstance(error, Unavailable) for error in lost)
    for seed in answered:
        pieces = results[seed]
        assert not isinstance(pieces, BaseException)
        assert ids(pieces) == script(PROMPT, seed, 0, 200)


async def test_the_placement_budget_bounds_how_many_replicas_one_request_may_take_along() -> None:
    async with script_pool(0, router=replace(FAST, placement_budget=2)) as pool:
        # The canary takes two steps, so the first step of a request is the last one.
        replicas = [await pool.spawn(f"r{number}", crash_after_steps=2) for number in range(3)]
        with pytest.raises(Unavailable):
            await pool.client.generate(PROMPT, max_tokens=50)
        await until(lambda: pool.num_ready == 1)
        await asyncio.sleep(0.5)
        assert [replica.process.returncode for replica in replicas].count(ENGINE_FAILED) == 2


async def test_with_no_replica_a_request_waits_a_little_and_ends_unavailable() -> None:
    async with script_pool(0, router=replace(FAST, wait_for_replica_s=0.2)) as pool:
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match="no replica is ready"):
            await pool.client.generate(PROMPT)
        waited_s = asyncio.get_running_loop().time() - started_s
    assert 0.15 < waited_s < 1


async def test_a_request_that_waits_is_answered_as_soon_as_a_replica_is_ready() -> None:
    async with script_pool(0, router=replace(FAST, wait_for_replica_s=10.0)) as pool:
        answer = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=5, seed=1))
        await asyncio.sleep(0.1)
        one = await start_replica(ReplicaConfig(routers=(pool.router.address,)))
        assert (await answer).token_ids == script(PROMPT, 1, 0, 5)
        await one.stop()


async def test_a_dead_replica_leaves_and_its_successor_comes_in_after_a_canary() -> None:
    async with script_pool(0) as pool:
        first = await pool.spawn("place")
        before = pool.router.pool.loads()[0].incarnation
        await first.kill()
        await until(lambda: pool.num_ready == 0)
        await pool.spawn("place")
        (load,) = [load for load in pool.router.pool.loads() if load.state == control_pb2.REPLICA_STATE_READY]
        whole = await pool.client.generate(PROMPT, max_tokens=5, seed=1)
    assert load.incarnation > before
    assert whole.token_ids == script(PROMPT, 1, 0, 5)


async def test_a_replica_that_fails_its_canary_stays_out_and_is_tried_again() -> None:
    async with script_pool(0, router=replace(FAST, canary_timeout_s=0.2)) as pool:
        one = await start_replica(
            ReplicaConfig(routers=(pool.router.address,)), ScriptKnobs(is_hanging=True, stall_s=NEVER_S)
        )
        await asyncio.sleep(1.0)
        assert list(pool.states.values()) == [control_pb2.REPLICA_STATE_STARTING]
        with pytest.raises(Unavailable):
            await pool.client.generate(PROMPT)
        one.engine.knobs.is_hanging = False
        await pool.router.wait_ready(timeout_s=5)
        assert len(one.engine.cancelled) >= 2
        await one.stop()


@pytest.mark.parametrize("knobs", [ScriptKnobs(crash_after_steps=20, step_s=0.005), ScriptKnobs(step_s=0.005)])
async def test_an_engine_that_dies_or_stalls_fails_its_replica_for_good(knobs: ScriptKnobs) -> None:
    async with script_pool(1, knobs=knobs) as pool:
        (one,) = pool.replicas
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        if knobs.crash_after_steps is None:
            one.engine.knobs.is_hanging = True
        with pytest.raises(Unavailable, match="engine of the replica"):
            await read(stream)
        await until(lambda: bool(one.failures))
        assert one.server.state is State.FAILED
        with pytest.raises((EngineDead, EngineStalled)):
            one.server.check()
        assert pool.num_ready == 0
        with pytest.raises(Unavailable):
            await pool.client.generate(PROMPT)


async def test_a_replica_process_whose_engine_died_exits_non_zero() -> None:
    async with script_pool(0) as pool:
        doomed = await pool.spawn("doomed", crash_after_steps=30, step_s=0.005)
        with pytest.raises(Unavailable):
            await read(pool.client.stream(PROMPT, max_tokens=3000))
        assert await asyncio.wait_for(doomed.process.wait(), 5) == ENGINE_FAILED


async def test_a_frozen_replica_is_given_up_and_taken_back_when_it_thaws() -> None:
    async with script_pool(0, router=replace(FAST, silence_timeout_s=1.0)) as pool:
        frozen = await pool.spawn("frozen", step_s=0.01)
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        frozen.send(signal.SIGSTOP)
        with pytest.raises(Unavailable, match="stopped responding"):
            await asyncio.wait_for(read(stream), 4)
        assert pool.num_ready == 0
        frozen.send(signal.SIGCONT)
        await pool.router.wait_ready(timeout_s=8)
        assert (await pool.client.generate(PROMPT, max_tokens=3, seed=1)).token_ids == script(PROMPT, 1, 0, 3)


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.004)) as pool:
        leaving, staying = pool.replicas
        streams = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=100, seed=s))) for s in range(8)]
        await until(lambda: leaving.server.num_live == 4)
        drain = asyncio.create_task(pool.client.drain(leaving.server.name, grace_s=10))
        await until(lambda: pool.states[leaving.server.name] == control_pb2.REPLICA_STATE_DRAINING)
        late = [await pool.client.generate(PROMPT, max_tokens=3) for _ in range(6)]
        early = await asyncio.gather(*streams)
        await drain
        await asyncio.wait_for(leaving.server.wait_stopped(), 1)
        assert leaving.server.state is State.STOPPED
        assert leaving.failures == []
    assert [ids(pieces) for pieces in early] == [script(PROMPT, seed, 0, 100) for seed in range(8)]
    assert {answer.execution.replica for answer in late if answer.execution} == {staying.server.name}


async def test_a_drain_under_load_loses_nothing() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.001)) as pool:
        finished: list[Answer] = []
        is_over = False

        async def keep_asking(seed: int) -> None:
            while not is_over:
                finished.append(await pool.client.generate(PROMPT, max_tokens=10, seed=seed))

        askers = [asyncio.create_task(keep_asking(seed)) for seed in range(8)]
        await asyncio.sleep(0.2)
        await pool.replicas[0].server.drain(5)
        count_at_drain = len(finished)
        await asyncio.sleep(0.2)
        is_over = True
        await asyncio.gather(*askers)
    assert len(finished) > count_at_drain > 0
    assert {len(answer.token_ids) for answer in finished} == {10}


async def test_what_outlasts_the_grace_of_a_drain_is_cut_off_unavailable() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01)) as pool:
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await asyncio.wait_for(pool.replicas[0].server.drain(0.2), 2)
        with pytest.raises(Unavailable, match="draining"):
            await read(stream)


async def test_a_router_drains_itself() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.004)) as pool:
        running = asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=100, seed=1)))
        await until(lambda: pool.router.pool.num_live == 1)
        drain = asyncio.create_task(pool.client.drain(grace_s=10))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="draining"):
            await pool.client.generate(PROMPT)
        assert ids(await running) == script(PROMPT, 1, 0, 100)
        await drain


async def test_draining_a_replica_nobody_knows_is_not_found() -> None:
    async with script_pool(1) as pool:
        with pytest.raises(NotFound, match="nobody"):
            await pool.client.drain("nobody", grace_s=1)


async def test_a_process_that_is_asked_to_stop_finishes_first() -> None:
    async with script_pool(0) as pool:
        leaving = await pool.spawn("leaving", step_s=0.004)
        running = asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=100, seed=1)))
        await until(lambda: pool.router.pool.num_live == 1)
        await asyncio.sleep(0.05)
        leaving.send(signal.SIGTERM)
        assert ids(await running) == script(PROMPT, 1, 0, 100)
        assert await asyncio.wait_for(leaving.process.wait(), 5) == 0


async def test_a_router_that_stops_tells_its_clients() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01)) as pool:
        async with AsyncGraphpoolClient(pool.router.address, ONE_TRY) as client:
            stream = client.stream(PROMPT, max_tokens=3000)
            await anext(stream)
            await pool.router.stop()
            with pytest.raises(CallError):
                await read(stream)
        await until(lambda: pool.replicas[0].engine.load().running == 0)


def test_errors_of_calls_belong_to_the_clusters_tree() -> None:
    assert issubclass(Unavailable, ClusterError)
