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
        doomed = await pool.spawn("doomed", hang_after_steps=2, stall_s=NEVER_S, is_preparing=True)
        answer = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=20, seed=3))
        await until(lambda: pool.router.pool.loads()[0].router_streams == 1)
        await pool.spawn("other")
        await doomed.kill()
        whole = await answer
    assert whole.token_ids == script(PROMPT, 3, 0, 20)
    assert whole.execution is not None
    assert (whole.execution.replica, whole.execution.attempts) == ("other", 2)


async def test_an_answer_whose_only_replica_dies_breaks_off_with_a_sentence() -> None:
    async with script_pool(0, router=replace(FAST, wait_to_resume_s=0.2)) as pool:
        doomed = await pool.spawn("doomed", step_s=0.01)
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await doomed.kill()
        with pytest.raises(Unavailable, match=r"broke off after \d+ tokens: 1 replica was lost"):
            await read(stream)


async def test_a_death_costs_no_request_a_token_wherever_it_runs() -> None:
    # A step of a busy machine may take a while: only the kill is to end a replica.
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.005, stall_s=60.0)) as pool:
        doomed = await pool.spawn("doomed", step_s=0.005, stall_s=60.0)
        streams = [pool.client.stream(PROMPT, max_tokens=400, seed=seed) for seed in range(12)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: [load.router_streams for load in pool.router.pool.loads()] == [6, 6])
        await asyncio.sleep(0.2)
        await doomed.kill()
        answers = await asyncio.gather(*readers)
    assert [ids(pieces) for pieces in answers] == [script(PROMPT, seed, 0, 400) for seed in range(12)]
    assert all([piece.sequence for piece in pieces] == list(range(len(pieces))) for pieces in answers)
    executions = [pieces[-1].execution for pieces in answers]
    assert sorted(one.attempts for one in executions if one) == [1] * 6 + [2] * 6


async def test_the_budget_bounds_how_many_losses_one_request_survives() -> None:
    async with script_pool(0, router=replace(FAST, resume_budget=1)) as pool:
        replicas = {name: await pool.spawn(name, step_s=0.01) for name in ("r0", "r1", "r2")}

        async def read_under_kills() -> None:
            kills = [5, 15]
            async for piece in pool.client.stream(PROMPT, max_tokens=3000):
                # A replica that dies while this request is tried alone would speak against the request.
                if kills and piece.sequence >= kills[0] and not pool.is_trying:
                    kills.pop(0)
                    loads = pool.router.pool.loads()
                    await replicas.pop(next(load.replica for load in loads if load.router_streams)).kill()

        with pytest.raises(Unavailable, match="2 replicas were lost"):
            await read_under_kills()
        assert len(replicas) == 1


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
        await pool.router.wait_ready(timeout_s=20)
        assert len(one.engine.cancelled) >= 2
        await one.stop()


@pytest.mark.parametrize("knobs", [ScriptKnobs(crash_after_steps=20, step_s=0.005), ScriptKnobs(step_s=0.005)])
async def test_an_engine_that_dies_or_stalls_fails_its_replica_for_good(knobs: ScriptKnobs) -> None:
    async with script_pool(1, knobs=knobs, router=replace(FAST, wait_to_resume_s=0.2)) as pool:
        (one,) = pool.replicas
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        if knobs.crash_after_steps is None:
            one.engine.knobs.is_hanging = True
        with pytest.raises(Unavailable, match="1 replica was lost"):
            await read(stream)
        await until(lambda: bool(one.failures))
        assert one.server.state is State.FAILED
        with pytest.raises((EngineDead, EngineStalled)):
            one.server.check()
        assert pool.num_ready == 0
        with pytest.raises(Unavailable):
            await pool.client.generate(PROMPT)


async def test_a_replica_process_whose_engine_died_exits_non_zero() -> None:
    async with script_pool(0, router=replace(FAST, wait_to_resume_s=0.2)) as pool:
        doomed = await pool.spawn("doomed", crash_after_steps=30, step_s=0.005)
        with pytest.raises(Unavailable):
            await read(pool.client.stream(PROMPT, max_tokens=3000))
        assert await asyncio.wait_for(doomed.process.wait(), 20) == ENGINE_FAILED


async def test_a_frozen_replica_loses_its_answers_to_others_and_is_taken_back_when_it_thaws() -> None:
    async with script_pool(0, router=replace(FAST, silence_timeout_s=1.0)) as pool:
        processes = {name: await pool.spawn(name, step_s=0.005, stall_s=NEVER_S) for name in ("one", "two")}
        stream = pool.client.stream(PROMPT, max_tokens=400, seed=7)
        first = await anext(stream)
        (serving,) = [load.replica for load in pool.router.pool.loads() if load.router_streams]
        processes[serving].send(signal.SIGSTOP)
        answer = [first, *await asyncio.wait_for(read(stream), 20)]
        assert ids(answer) == script(PROMPT, 7, 0, 400)
        assert pool.num_ready == 1
        processes[serving].send(signal.SIGCONT)
        await pool.router.wait_ready(2, timeout_s=20)


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.004)) as pool:
        leaving, staying = pool.replicas
        streams = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=300, seed=s))) for s in range(8)]
        await until(lambda: leaving.server.num_live == 4)
        drain = asyncio.create_task(pool.client.drain(leaving.server.name, grace_s=10))
        await until(lambda: pool.states[leaving.server.name] == control_pb2.REPLICA_STATE_DRAINING)
        late = [await pool.client.generate(PROMPT, max_tokens=3) for _ in range(6)]
        early = await asyncio.gather(*streams)
        await drain
        await asyncio.wait_for(leaving.server.wait_stopped(), 5)
        assert leaving.server.state is State.STOPPED
        assert leaving.failures == []
    assert [ids(pieces) for pieces in early] == [script(PROMPT, seed, 0, 300) for seed in range(8)]
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


async def test_what_outlasts_the_grace_of_a_drain_is_handed_over() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.005)) as pool:
        streams = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=300, seed=s))) for s in range(8)]
        leaving = pool.replicas[0]
        await until(lambda: leaving.server.num_live == 4)
        await asyncio.wait_for(leaving.server.drain(0.1), 5)
        answers = await asyncio.gather(*streams)
        assert leaving.server.num_live == 0
    assert [ids(pieces) for pieces in answers] == [script(PROMPT, seed, 0, 300) for seed in range(8)]
    assert [pieces[-1].execution.attempts for pieces in answers if pieces[-1].execution].count(2) == 4


async def test_what_outlasts_a_drain_with_nobody_to_take_over_is_cut_off_unavailable() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01), router=replace(FAST, wait_to_resume_s=0.2)) as pool:
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await asyncio.wait_for(pool.replicas[0].server.drain(0.2), 5)
        with pytest.raises(Unavailable, match="no replica is ready"):
            await read(stream)


async def test_a_router_drains_itself() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.004)) as pool:
        running = asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=500, seed=1)))
        await until(lambda: pool.router.pool.num_live == 1)
        drain = asyncio.create_task(pool.client.drain(grace_s=10))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="draining"):
            await pool.client.generate(PROMPT)
        assert ids(await running) == script(PROMPT, 1, 0, 500)
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
        assert await asyncio.wait_for(leaving.process.wait(), 20) == 0


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
