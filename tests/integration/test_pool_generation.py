"""Answers through a router, over real gRPC, from scripted engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Unpack

import grpc
import pytest

from cluster.client import (
    AlreadyExists,
    Answer,
    AsyncAnswerStream,
    AsyncGraphpoolClient,
    Cancelled,
    DeadlineExceeded,
    GraphpoolClient,
    InternalError,
    NotFound,
    ResourceExhausted,
    SamplingOptions,
    Unavailable,
)
from cluster.config import ClientConfig, ReplicaConfig
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from tests.fakes.script_engine import CONTROL_IDS, ScriptKnobs, script, script_text
from tests.fakes.script_pool import FAST, ONE_TRY, ScriptPool, script_pool, start_replica
from tests.fakes.waiting import until
from worker.request import FinishReason

PROMPT = (10, 20, 30)


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    async with stream:
        return [piece async for piece in stream]


async def pieces_of(pool: ScriptPool, **options: Unpack[SamplingOptions]) -> list[Answer]:
    return await read(pool.client.stream(PROMPT, **options))


async def test_a_stream_is_the_script_in_contiguous_pieces() -> None:
    async with script_pool() as pool:
        pieces = await pieces_of(pool, max_tokens=100, seed=5)
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    assert tuple(token for piece in pieces for token in piece.token_ids) == script(PROMPT, 5, 0, 100)
    assert "".join(piece.text for piece in pieces) == script_text(script(PROMPT, 5, 0, 100))
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]


async def test_the_first_token_travels_alone_and_the_rest_is_packed() -> None:
    knobs = ScriptKnobs(step_s=0.001)
    async with script_pool(
        replica=ReplicaConfig(flush_interval_ms=100, max_flush_interval_ms=100), knobs=knobs
    ) as pool:
        pieces = await pieces_of(pool, max_tokens=100)
    assert len(pieces[0].token_ids) == 1
    assert len(pieces) < 25


async def test_an_interval_of_zero_sends_every_step() -> None:
    replica, knobs = ReplicaConfig(flush_interval_ms=0, max_flush_interval_ms=0), ScriptKnobs(step_s=0.01)
    async with script_pool(replica=replica, knobs=knobs) as pool:
        pieces = await pieces_of(pool, max_tokens=20)
    assert len(pieces) >= 18


async def test_sums_and_times_come_with_the_first_and_last_piece() -> None:
    async with script_pool() as pool:
        pieces = await pieces_of(pool, max_tokens=40)
        name = pool.replicas[0].server.name
    first, last = pieces[0], pieces[-1]
    assert first.usage == pb.Usage(prompt_tokens=3)
    assert all(piece.timings is None and piece.execution is None for piece in pieces[:-1])
    assert last.usage == pb.Usage(prompt_tokens=3, completion_tokens=40)
    assert last.execution is not None
    assert (last.execution.replica, last.execution.attempts, last.execution.tier) == (name, 1, 64)
    assert last.timings is not None
    hops = last.timings.router_ms + last.timings.queue_ms + last.timings.prefill_ms + last.timings.decode_ms
    assert 0 < hops <= last.timings.total_ms


async def test_a_whole_answer_equals_its_stream() -> None:
    async with script_pool() as pool:
        whole = await pool.client.generate(PROMPT, max_tokens=50, seed=7)
        pieces = await pieces_of(pool, max_tokens=50, seed=7)
    assert whole.token_ids == tuple(token for piece in pieces for token in piece.token_ids)
    assert whole.text == "".join(piece.text for piece in pieces)
    assert whole.usage == pieces[-1].usage


@pytest.mark.parametrize("n", [1, 2, 8])
async def test_every_choice_arrives_whole_and_ends(n: int) -> None:
    async with script_pool() as pool:
        whole = await pool.client.generate(PROMPT, max_tokens=30, seed=1, n=n)
        pieces = await pieces_of(pool, max_tokens=30, seed=1, n=n)
    assert [choice.token_ids for choice in whole.choices] == [script(PROMPT, 1, index, 30) for index in range(n)]
    ends = [choice.index for piece in pieces for choice in piece.choices if choice.finish_reason]
    assert sorted(ends) == list(range(n))


async def test_a_seed_that_is_given_is_used_and_one_that_is_not_is_drawn_anew() -> None:
    async with script_pool(2) as pool:
        seeded = [await pool.client.generate(PROMPT, max_tokens=20, seed=3) for _ in range(4)]
        unseeded = [await pool.client.generate(PROMPT, max_tokens=20) for _ in range(4)]
    assert {answer.token_ids for answer in seeded} == {script(PROMPT, 3, 0, 20)}
    assert len({answer.token_ids for answer in unseeded}) == 4


async def test_log_probabilities_come_with_their_tokens() -> None:
    async with script_pool() as pool:
        whole = await pool.client.generate(PROMPT, max_tokens=10, logprobs=2)
        none = await pool.client.generate(PROMPT, max_tokens=10)
    (choice,) = whole.choices
    assert [logprob.token_id for logprob in choice.logprobs] == list(choice.token_ids)
    assert all(len(logprob.top) == 2 for logprob in choice.logprobs)
    assert none.choices[0].logprobs == ()


async def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    answer = script(PROMPT, 2, 0, 50)
    async with script_pool() as pool:
        whole = await pool.client.generate(PROMPT, max_tokens=50, seed=2, stop_token_ids=[answer[20]])
    (choice,) = whole.choices
    assert choice.token_ids == answer[: answer.index(answer[20]) + 1]
    assert (choice.finish_reason, choice.stop_token_id) == (FinishReason.STOP, answer[20])


async def test_chat_is_rendered_answered_and_returned_as_the_assistant() -> None:
    rendered = (2, *(3 + byte for byte in b"user"), 2, *(3 + byte for byte in b"hi"))
    async with script_pool() as pool:
        ids = await pool.client.tokenize(messages=[{"role": "user", "content": "hi"}])
        whole = await pool.client.chat([("user", "hi")], max_tokens=9, seed=4)
        async with pool.client.chat_stream([("user", "hi")], max_tokens=9, seed=4) as stream:
            streamed = [piece async for piece in stream]
        async with grpc.aio.insecure_channel(pool.router.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            message = pb.ChatMessage(role="user", content="hi")
            raw = await stub.Chat(pb.ChatRequest(messages=[message], sampling=pb.SamplingParams(max_tokens=9, seed=4)))
    assert set(rendered) < {*ids, 2}
    assert whole.token_ids == script(ids, 4, 0, 9)
    assert tuple(token for piece in streamed for token in piece.token_ids) == whole.token_ids
    assert raw.choices[0].message == pb.ChatMessage(role="assistant", content=whole.text)


async def test_text_goes_to_ids_and_back() -> None:
    async with script_pool() as pool:
        ids = await pool.client.tokenize("hé")
        bare = await pool.client.tokenize("hé", add_special_tokens=False)
        text = await pool.client.detokenize(ids)
        without = await pool.client.detokenize(ids, skip_special_tokens=True)
    assert ids == [CONTROL_IDS["<|begin|>"], *bare]
    assert (text, without) == ("<|begin|>hé", "hé")


async def test_the_request_id_is_made_or_kept_and_is_in_the_trailers() -> None:
    async with script_pool() as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for given in ("", "mine-1"):
            sampling = pb.SamplingParams(max_tokens=2)
            call = stub.GenerateStream(pb.GenerateRequest(request_id=given, text="x", sampling=sampling))
            ids = {response.request_id async for response in call}
            trailers = dict(await call.trailing_metadata())
            assert ids == {trailers["request-id"]}
            assert trailers["request-id"] == given or (not given and len(trailers["request-id"]) == 32)


async def test_nothing_is_sent_before_the_first_token() -> None:
    async with script_pool() as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        pool.replicas[0].engine.knobs.is_hanging = True
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=2)))
        headers = asyncio.create_task(call.initial_metadata())
        await asyncio.sleep(0.2)
        assert not headers.done()
        pool.replicas[0].engine.knobs.is_hanging = False
        await headers
        assert len([response async for response in call]) >= 1


async def test_an_id_that_is_live_is_refused_and_free_again_afterwards() -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.005)) as pool:
        async with pool.client.stream(PROMPT, request_id="twice", max_tokens=1000) as stream:
            await anext(stream)
            with pytest.raises(AlreadyExists, match="request_id"):
                await pool.client.generate(PROMPT, request_id="twice", max_tokens=1)
            await anext(stream)
        await pool.router.pool.wait_idle(20)
        again = await pool.client.generate(PROMPT, request_id="twice", max_tokens=1)
    assert again.request_id == "twice"


async def test_a_model_that_is_not_served_is_not_found_and_the_served_one_is_named() -> None:
    async with script_pool() as pool:
        with pytest.raises(NotFound, match="script is"):
            await pool.client.generate(PROMPT, model="gpt-17")
        with pytest.raises(NotFound):
            await pool.client.tokenize("x", model="gpt-17")
        with pytest.raises(NotFound):
            await pool.client.model_info("gpt-17")
        assert (await pool.client.generate(PROMPT, model="script", max_tokens=1)).token_ids
        assert (await pool.client.model_info()).name == "script"


@pytest.mark.parametrize("is_direct", [False, True])
async def test_a_deadline_that_passes_is_an_error_and_frees_the_engine(is_direct: bool) -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.005)) as pool:
        address = pool.replicas[0].server.address if is_direct else pool.router.address
        async with AsyncGraphpoolClient(address, ONE_TRY) as client:
            with pytest.raises(DeadlineExceeded):
                await client.generate(PROMPT, max_tokens=3000, timeout_s=0.1)
            with pytest.raises(DeadlineExceeded):
                await read(client.stream(PROMPT, max_tokens=3000, timeout_s=0.1))
        assert await pool.replicas[0].server._backend.wait_idle(20)
        await wait_for_rows(pool, 0)


async def test_a_request_that_expires_in_the_queue_is_never_answered_in_part() -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.005, max_rows=1)) as pool:
        running = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(running)
        with pytest.raises(DeadlineExceeded):
            await pool.client.generate(PROMPT, max_tokens=2, timeout_s=0.1)
        running.cancel()


async def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.01, max_rows=1, max_waiting=1)) as pool:
        running = pool.client.stream(PROMPT, max_tokens=500)
        await anext(running)
        waiting = pool.client.stream(PROMPT, max_tokens=5)
        await until(lambda: pool.replicas[0].engine.load().waiting == 1)
        with pytest.raises(ResourceExhausted, match="waiting") as caught:
            await pool.client.generate(PROMPT, max_tokens=2)
        running.cancel()
        waiting.cancel()
    assert caught.value.retry_after_s == pytest.approx(0.05)


async def test_a_client_comes_back_when_it_was_told_to() -> None:
    knobs = ScriptKnobs(step_s=0.002, max_rows=1, max_waiting=1)
    async with script_pool(knobs=knobs) as pool, AsyncGraphpoolClient(pool.router.address) as patient:
        running = pool.client.stream(PROMPT, max_tokens=40)
        await anext(running)
        waiting = pool.client.stream(PROMPT, max_tokens=5)
        await asyncio.sleep(0.02)
        answer = await patient.generate(PROMPT, max_tokens=3, seed=1)
        running.cancel()
        waiting.cancel()
    assert answer.token_ids == script(PROMPT, 1, 0, 3)


async def test_an_answer_too_large_for_one_message_is_refused_once_and_can_be_streamed() -> None:
    knobs = ScriptKnobs(step_s=0.002, tokens_per_step=50, max_model_len=100_000)
    async with script_pool(knobs=knobs) as pool, AsyncGraphpoolClient(pool.router.address) as patient:
        with pytest.raises(ResourceExhausted, match="stream it instead") as caught:
            await patient.generate(PROMPT, max_tokens=24_000, logprobs=20)
        assert caught.value.retry_after_s is None
        pieces = await read(patient.stream(PROMPT, max_tokens=24_000, logprobs=20))
    assert sum(len(piece.token_ids) for piece in pieces) == 24_000


async def test_a_client_tries_again_while_nobody_is_there_and_not_after_the_first_piece() -> None:
    config = ClientConfig(max_attempts=5, backoff_min_s=0.2)
    knobs = ScriptKnobs(step_s=0.005)
    async with script_pool(0, router=replace(FAST, wait_for_replica_s=0.0)) as pool:
        client = AsyncGraphpoolClient(pool.router.address, config)
        answer = asyncio.create_task(client.generate(PROMPT, max_tokens=5, seed=1))
        await asyncio.sleep(0.1)
        one = await start_replica(ReplicaConfig(routers=(pool.router.address,)), knobs)
        assert (await answer).token_ids == script(PROMPT, 1, 0, 5)
        stream = client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await one.stop()
        with pytest.raises(Unavailable):
            await read(stream)
        await client.close()


async def test_a_router_takes_no_more_streams_than_it_may() -> None:
    async with script_pool(router=replace(FAST, max_streams=2), knobs=ScriptKnobs(step_s=0.01)) as pool:
        streams = [pool.client.stream(PROMPT, max_tokens=500) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ResourceExhausted, match="2 requests are being answered") as caught:
            await pool.client.generate(PROMPT)
        assert caught.value.retry_after_s
        for stream in streams:
            stream.cancel()


async def test_a_row_that_fails_takes_no_other_with_it() -> None:
    knobs = ScriptKnobs(step_s=0.002, fail_on_prompt=(66, 66))
    async with script_pool(knobs=knobs) as pool:
        others = [asyncio.create_task(pool.client.generate(PROMPT, max_tokens=50, seed=seed)) for seed in range(8)]
        with pytest.raises(InternalError, match="NaN"):
            await pool.client.generate((66, 66), max_tokens=50)
        answers = await asyncio.gather(*others)
    assert [answer.token_ids for answer in answers] == [script(PROMPT, seed, 0, 50) for seed in range(8)]


async def test_an_operator_can_abort_a_request() -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.005)) as pool:
        stream = pool.client.stream(PROMPT, request_id="doomed", max_tokens=3000)
        await anext(stream)
        assert await pool.client.abort("doomed")
        with pytest.raises(Cancelled, match="aborted"):
            await read(stream)
        assert not await pool.client.abort("doomed")
        await wait_for_rows(pool, 0)


async def test_a_replica_can_be_called_directly_and_aborts_too() -> None:
    async with script_pool(knobs=ScriptKnobs(step_s=0.005)) as pool:
        direct = AsyncGraphpoolClient(pool.replicas[0].server.address, ONE_TRY)
        whole = await direct.generate(PROMPT, max_tokens=30, seed=9)
        assert whole.token_ids == script(PROMPT, 9, 0, 30)
        stream = direct.stream(PROMPT, request_id="doomed", max_tokens=3000)
        await anext(stream)
        assert await direct.abort("doomed")
        with pytest.raises(Cancelled, match="aborted"):
            await read(stream)
        assert (await direct.server_info()).role == "replica"
        await direct.close()


async def test_the_blocking_client_does_the_same() -> None:
    def call(address: str) -> None:
        with GraphpoolClient(address, ONE_TRY) as client:
            assert client.generate(PROMPT, max_tokens=20, seed=1).token_ids == script(PROMPT, 1, 0, 20)
            with client.stream(PROMPT, max_tokens=20, seed=1) as stream:
                ids = tuple(token for piece in stream for token in piece.token_ids)
            assert ids == script(PROMPT, 1, 0, 20)
            chat = client.chat([("user", "x")], max_tokens=4, seed=1)
            with client.chat_stream([{"role": "user", "content": "x"}], max_tokens=4, seed=1) as stream:
                assert "".join(piece.text for piece in stream) == chat.text
            assert client.detokenize(client.tokenize("abc"), skip_special_tokens=True) == "abc"
            assert client.model_info().vocab_size == 512
            status = client.status()
            assert (status.server.role, len(status.replicas)) == ("router", 1)
            with pytest.raises(DeadlineExceeded):
                client.generate(PROMPT, max_tokens=3000, timeout_s=0.05)
            stream = client.stream(PROMPT, max_tokens=3000)
            next(stream)
            stream.cancel()
            with pytest.raises(Cancelled):
                list(stream)
            assert not client.abort("nobody")

    async with script_pool(knobs=ScriptKnobs(step_s=0.003)) as pool:
        await asyncio.to_thread(call, pool.router.address)


async def wait_for_rows(pool: ScriptPool, num_rows: int, timeout_s: float = 20.0) -> None:
    """Until the engines hold that many rows altogether."""
    async with asyncio.timeout(timeout_s):
        while sum(replica.engine.load().running for replica in pool.replicas) != num_rows:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
