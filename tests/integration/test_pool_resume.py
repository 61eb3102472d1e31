"""Answers that outlive their replica, and their router."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.client import (
    Answer,
    AsyncAnswerStream,
    AsyncGraphpoolClient,
    GraphpoolClient,
    InvalidArgument,
    Unavailable,
)
from cluster.client.errors import call_error
from cluster.config import ReplicaConfig
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from protos.control_pb2 import REPLICA_STATE_READY
from tests.fakes.replica_process import ReplicaProcess, spawn_replica
from tests.fakes.router_process import RouterProcess, spawn_router
from tests.fakes.scrape import scrape
from tests.fakes.script_engine import ScriptKnobs, script, script_text
from tests.fakes.script_pool import FAST, ONE_TRY, script_pool, start_replica
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
NUM_TOKENS = 200
PATIENT_S = 60.0
"""A step of a busy machine may take a while: here nothing is to be taken for a stall."""
LONG = 800


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    async with stream:
        return [piece async for piece in stream]


def ids(pieces: Sequence[Answer], index: int = 0) -> tuple[int, ...]:
    return tuple(
        token for piece in pieces for choice in piece.choices if choice.index == index for token in choice.token_ids
    )


def text(pieces: Sequence[Answer], index: int = 0) -> str:
    return "".join(choice.text for piece in pieces for choice in piece.choices if choice.index == index)


def assert_whole(pieces: Sequence[Answer], seed: int, num_tokens: int = NUM_TOKENS, num_choices: int = 1) -> None:
    """Every token once, in unbroken messages, with sums over all of it."""
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    for index in range(num_choices):
        assert ids(pieces, index) == script(PROMPT, seed, index, num_tokens)
        assert text(pieces, index) == script_text(script(PROMPT, seed, index, num_tokens))
    usage = pieces[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), num_choices * num_tokens)


async def until_ready(client: AsyncGraphpoolClient, num_replicas: int) -> None:
    for _ in range(300):
        if [load.state for load in await client.loads()].count(REPLICA_STATE_READY) == num_replicas:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the replicas do not become ready")


@asynccontextmanager
async def two_routers(
    num_replicas: int = 2, **knobs: object
) -> AsyncIterator[tuple[list[RouterProcess], list[ReplicaProcess]]]:
    """Routers and replicas, all of them processes, every replica on both routers."""
    config = {"listen": "127.0.0.1:0", "announce_period_s": 0.2}
    routers = [await spawn_router(config) for _ in range(2)]
    addresses = [router.address for router in routers]
    replicas = [await spawn_replica({"routers": addresses, "name": f"r{n}"}, knobs) for n in range(num_replicas)]
    try:
        for router in routers:
            async with AsyncGraphpoolClient(router.address, ONE_TRY) as client:
                await until_ready(client, num_replicas)
        yield routers, replicas
    finally:
        for process in (*routers, *replicas):
            await process.kill()


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_answer_goes_on_to_the_token_after_its_replica_is_killed(num_choices: int) -> None:
    async with script_pool(0) as pool:
        processes = {name: await pool.spawn(name, step_s=0.003) for name in ("r0", "r1", "r2")}
        pieces: list[Answer] = []
        kills = [3, 9]
        async for piece in pool.client.stream(PROMPT, max_tokens=LONG, seed=4, n=num_choices):
            pieces.append(piece)
            # A replica that dies while this request is tried alone would speak against the request.
            if kills and piece.sequence >= kills[0] and not pool.is_trying:
                # What is read here may have come from a replica that was killed just now.
                serving = [load.replica for load in pool.router.pool.loads() if load.router_streams]
                if serving and serving[0] in processes:
                    kills.pop(0)
                    await processes.pop(serving[0]).kill()
    assert_whole(pieces, 4, LONG, num_choices=num_choices)
    assert pieces[-1].execution is not None
    assert pieces[-1].execution.attempts == 3


async def test_an_answer_without_a_model_name_goes_on_with_the_model_that_began_it() -> None:
    async with script_pool(0) as pool:
        doomed = await pool.spawn("doomed", model="one", step_s=0.01, stall_s=PATIENT_S)
        stream = pool.client.stream(PROMPT, max_tokens=LONG, seed=4)
        pieces = [await anext(stream)]
        await pool.spawn("another", model="two", step_s=0.003, stall_s=PATIENT_S)
        await doomed.kill()
        await pool.spawn("again", model="one", step_s=0.003, stall_s=PATIENT_S)
        pieces += await read(stream)
    assert_whole(pieces, 4, LONG)
    assert pieces[-1].execution is not None
    assert pieces[-1].execution.replica == "again"


async def test_resumed_answers_show_in_the_metrics() -> None:
    async with script_pool(1, router=replace(FAST, metrics_listen="127.0.0.1:0")) as pool:
        doomed = await pool.spawn("doomed", step_s=0.01)
        streams = [pool.client.stream(PROMPT, max_tokens=100, seed=seed) for seed in range(2)]
        begun = [await anext(stream) for stream in streams]
        await doomed.kill()
        for seed, (first, stream) in enumerate(zip(begun, streams, strict=True)):
            assert_whole([first, *await read(stream)], seed, 100)
        seen = await scrape(pool.router.metrics_address)
    assert seen.value("resumed_streams_total") == seen.value("repeated_placements_total") == 1
    assert seen.value("trials_total") == 1
    assert seen.value("poisoned_requests_total") == 0


async def test_a_choice_that_has_ended_is_not_generated_again() -> None:
    stop = script(PROMPT, 4, 0, 30)[-1]
    place = script(PROMPT, 4, 0, 30).index(stop)
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.001)) as pool:
        doomed = await pool.spawn("doomed", step_s=0.004)
        async with AsyncGraphpoolClient(pool.router.address, ONE_TRY) as client:
            for _ in range(2):
                pieces: list[Answer] = []
                async for piece in client.stream(PROMPT, max_tokens=150, seed=4, n=2, stop_token_ids=[stop]):
                    pieces.append(piece)
                    loads = {load.replica: load.router_streams for load in pool.router.pool.loads()}
                    if len(ids(pieces)) > place and loads.get("doomed"):
                        await doomed.kill()
                assert ids(pieces) == script(PROMPT, 4, 0, place + 1)
                finishes = [choice for one in pieces for choice in one.choices if choice.finish_reason]
                assert sorted(choice.index for choice in finishes) == [0, 1]


async def test_only_what_a_router_moves_comes_to_an_engine_as_begun() -> None:
    async with script_pool(0) as pool:
        doomed = await pool.spawn("doomed", step_s=0.005)
        async with pool.client.stream(PROMPT, max_tokens=LONG, seed=4) as stream:
            pieces = [await anext(stream)]
            heir = await start_replica(ReplicaConfig(routers=(pool.router.address,)))
            pool.replicas.append(heir)
            await until(lambda: pool.num_ready == 2)
            submit, begun = heir.engine.submit, []

            def note(work: Any) -> None:
                begun.append(work.is_moved)
                submit(work)

            heir.engine.submit = note  # type: ignore[method-assign, assignment]
            await doomed.kill()
            pieces += [piece async for piece in stream]
        assert_whole(pieces, 4, LONG)
        delivered = pb.DeliveredChoice(index=0, token_ids=script(PROMPT, 5, 0, 7))
        resume = pb.ResumeRequest(request=request(max_tokens=30, seed=5), delivered=[delivered], next_sequence=3)
        async with Wire(pool.router.address) as wire:
            assert [piece async for piece in wire.stub.Resume(resume)]
    assert begun == [True, False]


class Wire:
    """Speaks the contract itself."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close(None)


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(**sampling))


async def test_the_first_message_alone_tells_the_seed_whether_it_was_given_or_drawn() -> None:
    async with script_pool(1) as pool, Wire(pool.router.address) as wire:
        given = [piece async for piece in wire.stub.GenerateStream(request(max_tokens=30, seed=5))]
        drawn = [piece async for piece in wire.stub.GenerateStream(request(max_tokens=30))]
        whole = await wire.stub.Generate(request(max_tokens=30, seed=6))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=pb.SamplingParams(seed=7))
        chat.sampling.max_tokens = 30
        spoken = [piece async for piece in wire.stub.ChatStream(chat)]
    assert given[0].seed == 5
    assert spoken[0].seed == 7
    assert whole.seed == 6
    assert drawn[0].HasField("seed")
    assert not any(piece.HasField("seed") for pieces in (given, drawn, spoken) for piece in pieces[1:])
    assert [token for piece in drawn for token in piece.choices[0].token_ids] == list(
        script(PROMPT, drawn[0].seed, 0, 30)
    )


@pytest.mark.parametrize("is_direct", [False, True], ids=["router", "replica"])
@pytest.mark.parametrize("num_delivered", [0, 1, 7, 29, 30])
async def test_resume_brings_what_follows_the_delivered_tokens(is_direct: bool, num_delivered: int) -> None:
    delivered = pb.DeliveredChoice(index=0, token_ids=script(PROMPT, 5, 0, num_delivered))
    resume = pb.ResumeRequest(request=request(max_tokens=30, seed=5), delivered=[delivered], next_sequence=3)
    async with script_pool(1) as pool:
        address = pool.replicas[0].server.address if is_direct else pool.router.address
        async with Wire(address) as wire:
            pieces = [piece async for piece in wire.stub.Resume(resume)]
    assert [piece.sequence for piece in pieces] == list(range(3, 3 + len(pieces)))
    brought = [token for piece in pieces for choice in piece.choices for token in choice.token_ids]
    assert brought == list(script(PROMPT, 5, 0, 30)[num_delivered:])
    assert [choice.finish_reason for piece in pieces for choice in piece.choices][-1] == pb.FINISH_REASON_LENGTH
    assert pieces[-1].usage.completion_tokens == 30
    assert not pieces[0].HasField("seed")


async def test_resume_with_every_choice_ended_brings_the_sums_alone() -> None:
    tokens = script(PROMPT, 5, 0, 30)
    delivered = pb.DeliveredChoice(index=0, token_ids=tokens, is_finished=True)
    resume = pb.ResumeRequest(request=request(max_tokens=30, seed=5), delivered=[delivered], next_sequence=3)
    async with script_pool(1) as pool, Wire(pool.router.address) as wire:
        (piece,) = [piece async for piece in wire.stub.Resume(resume)]
    assert (piece.sequence, len(piece.choices)) == (3, 0)
    assert (piece.usage.prompt_tokens, piece.usage.completion_tokens) == (3, 30)
    assert piece.HasField("timings")


GOOD = pb.DeliveredChoice(index=0, token_ids=script(PROMPT, 5, 0, 4))


@pytest.mark.parametrize(
    ("resume", "field"),
    [
        (pb.ResumeRequest(request=request(max_tokens=30), delivered=[GOOD], next_sequence=2), "seed"),
        (pb.ResumeRequest(request=request(max_tokens=30, seed=5), delivered=[GOOD]), "next_sequence"),
        (pb.ResumeRequest(request=request(max_tokens=3, seed=5), delivered=[GOOD], next_sequence=2), "delivered"),
        (pb.ResumeRequest(request=request(seed=5), delivered=[GOOD, GOOD], next_sequence=2), "delivered"),
        (pb.ResumeRequest(delivered=[GOOD], next_sequence=2, request=pb.GenerateRequest()), "seed"),
        (pb.ResumeRequest(), "prompt"),
        (
            pb.ResumeRequest(
                request=request(seed=5), delivered=[pb.DeliveredChoice(index=8, token_ids=[5])], next_sequence=1
            ),
            "delivered",
        ),
        (
            pb.ResumeRequest(
                request=request(seed=5), delivered=[pb.DeliveredChoice(index=1, token_ids=[5])], next_sequence=1
            ),
            "delivered",
        ),
        (
            pb.ResumeRequest(
                request=request(seed=5), delivered=[pb.DeliveredChoice(index=0, token_ids=[70_000])], next_sequence=1
            ),
            "delivered",
        ),
    ],
)
async def test_a_resume_that_no_answer_can_have_led_to_is_refused_by_name(resume: pb.ResumeRequest, field: str) -> None:
    async with script_pool(1) as pool, Wire(pool.router.address) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [piece async for piece in wire.stub.Resume(resume)]
    error = call_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert field in error.details


async def test_an_answer_that_breaks_off_says_where_to_go_on() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01)) as pool, Wire(pool.router.address) as wire:
        call = wire.stub.GenerateStream(request(max_tokens=3000, seed=5))
        pieces = [await call.read() for _ in range(3)]
        await pool.router.stop()
        trailers = dict(await call.trailing_metadata())
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert trailers["request-id"] == pieces[0].request_id
        assert int(trailers["resume-index"]) >= 3


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_client_goes_on_through_the_next_router_when_its_own_is_killed(is_chat: bool) -> None:
    async with two_routers(step_s=0.004) as (routers, _):
        addresses = [router.address for router in routers]
        async with AsyncGraphpoolClient(targets=addresses) as client:
            pieces: list[Answer] = []
            gap_s, last_s = 0.0, time.monotonic()
            messages = [("user", "hello")]
            stream = (
                client.chat_stream(messages, max_tokens=NUM_TOKENS, n=2)
                if is_chat
                else client.stream(PROMPT, max_tokens=NUM_TOKENS, n=2)
            )
            async for piece in stream:
                gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
                pieces.append(piece)
                if piece.sequence == 5:
                    routers[0].send(signal.SIGKILL)
    seed = pieces[0].seed
    assert seed is not None
    assert gap_s < 1.0
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    if is_chat:
        assert len(ids(pieces)) == len(ids(pieces, 1)) == NUM_TOKENS
    else:
        assert_whole(pieces, seed, num_choices=2)


async def test_the_blocking_client_goes_on_too_and_stays_with_the_router_that_lives() -> None:
    async with two_routers(step_s=0.004) as (routers, _):

        def ask() -> list[Answer]:
            with GraphpoolClient(",".join(router.address for router in routers)) as client:
                pieces = []
                for piece in client.stream(PROMPT, max_tokens=NUM_TOKENS, seed=9):
                    pieces.append(piece)
                    if piece.sequence == 5:
                        routers[0].send(signal.SIGKILL)
                started_s = time.monotonic()
                assert client.generate(PROMPT, max_tokens=5, seed=1).token_ids == script(PROMPT, 1, 0, 5)
                assert time.monotonic() - started_s < 1
                assert client.server_info().role == "router"
            return pieces

        assert_whole(await asyncio.to_thread(ask), 9)


async def test_before_the_first_message_a_request_is_simply_asked_elsewhere() -> None:
    async with script_pool(1) as pool:
        nobody = "127.0.0.1:1"
        async with AsyncGraphpoolClient(f"{nobody}, {pool.router.address}") as client:
            started_s = time.monotonic()
            assert (await client.generate(PROMPT, max_tokens=5, seed=1)).token_ids == script(PROMPT, 1, 0, 5)
        async with AsyncGraphpoolClient(targets=(nobody, pool.router.address)) as client:
            assert_whole(await read(client.stream(PROMPT, max_tokens=NUM_TOKENS, seed=2)), 2)
        assert time.monotonic() - started_s < 3


async def test_when_every_router_is_gone_the_answer_ends_unavailable() -> None:
    async with two_routers(1, step_s=0.01) as (routers, _):
        addresses = [router.address for router in routers]
        async with AsyncGraphpoolClient(targets=addresses) as client:
            stream = client.stream(PROMPT, max_tokens=3000)
            await anext(stream)
            for router in routers:
                await router.kill()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(read(stream), 20)


async def test_what_a_client_says_of_the_prefix_cache_reaches_the_engine() -> None:
    one = await start_replica(ReplicaConfig())
    seen: list[tuple[bool, str]] = []
    submit = one.engine.submit

    def note(work: Any) -> None:
        seen.append((work.use_prefix_cache, work.cache_salt))
        submit(work)

    one.engine.submit = note  # type: ignore[method-assign, assignment]
    async with AsyncGraphpoolClient(one.server.address, ONE_TRY) as client:
        await client.generate(PROMPT, max_tokens=2, cache_salt="mine")
        await client.chat([("user", "x")], max_tokens=2, use_prefix_cache=False)
    await one.stop()
    assert seen == [(True, "mine"), (False, "")]
