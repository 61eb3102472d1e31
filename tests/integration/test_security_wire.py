"""S11, S12 and S13: limits of requests, of messages and of connections, each on both of its sides."""

from __future__ import annotations

import asyncio
import gzip
import math
import resource
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster import transport
from cluster.config import MESSAGE_BYTES
from cluster.security import http
from protos import generation_pb2 as pb
from tests.fakes.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    RawConnection,
    frame,
    grpc_headers,
    literal,
    message,
)
from tests.fakes.scrape import fetch
from tests.fakes.script_engine import VOCAB_SIZE, ScriptKnobs
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.secured import secured, secured_pool
from tests.fakes.waiting import until

GENERATE = "/graphpool.v1.GenerationService/Generate"
CHAT = "/graphpool.v1.GenerationService/Chat"
LONGEST = ScriptKnobs().max_model_len
OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INT32, INT64 = 2**31, 2**63


@pytest.fixture
async def pool() -> AsyncIterator[ScriptPool]:
    async with script_pool() as made:
        yield made


async def send(address: str, raw: bytes, path: str = GENERATE, **options: Any) -> tuple[grpc.StatusCode, str]:
    """A request as bytes; how it ended."""
    limits = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=limits) as channel:
        call: Any = channel.unary_unary(path)(raw, timeout=30, **options)  # type: ignore[call-arg]
        return await call.code(), await call.details() or ""


async def still_answers(pool: ScriptPool) -> None:
    answer = await pool.client.generate((10, 20), max_tokens=3, timeout_s=20)
    assert len(answer.choices[0].token_ids) == 3


def sampled(**values: Any) -> bytes:
    bias = values.pop("logit_bias", {})
    sampling = pb.SamplingParams(**{"max_tokens": 2, **values})
    sampling.logit_bias.update(bias)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling).SerializeToString()


BOUNDS: Mapping[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "n": ([{"n": 1}, {"n": 8}], [{"n": 0}, {"n": 9}]),
    "logprobs": ([{"logprobs": 0}, {"logprobs": 20}], [{"logprobs": -1}, {"logprobs": 21}]),
    "stop": (
        [{"stop": ["x"] * 16}, {"stop": ["s" * 256]}],
        [{"stop": ["x"] * 17}, {"stop": ["s" * 257]}, {"stop": [""]}],
    ),
    "logit_bias": (
        [{"logit_bias": dict.fromkeys(range(300), 1.0)}, {"logit_bias": {5: 100.0, 6: -100.0}}],
        [
            {"logit_bias": dict.fromkeys(range(301), 1.0)},
            {"logit_bias": {5: 100.1}},
            {"logit_bias": {VOCAB_SIZE: 1.0}},
            {"logit_bias": {-1: 1.0}},
        ],
    ),
    "max_tokens": (
        [{"max_tokens": 1}, {"max_tokens": LONGEST - 1}],
        [{"max_tokens": 0}, {"max_tokens": LONGEST}, {"max_tokens": -1}],
    ),
    "min_tokens": ([{"min_tokens": 0}, {"min_tokens": 2}], [{"min_tokens": -1}, {"min_tokens": 3}]),
    "temperature": ([{"temperature": 0.0}, {"temperature": 100.0}], [{"temperature": -0.001}]),
    "top_p": ([{"top_p": 1e-6}, {"top_p": 1.0}], [{"top_p": 0.0}, {"top_p": 1.0001}]),
    "top_k": ([{"top_k": -1}, {"top_k": 0}, {"top_k": VOCAB_SIZE + 1}], [{"top_k": -2}, {"top_k": INT32}]),
    "min_p": ([{"min_p": 0.0}, {"min_p": 1.0}], [{"min_p": -0.001}, {"min_p": 1.001}]),
    "presence_penalty": (
        [{"presence_penalty": -2.0}, {"presence_penalty": 2.0}],
        [{"presence_penalty": -2.001}, {"presence_penalty": 2.001}],
    ),
    "frequency_penalty": (
        [{"frequency_penalty": -2.0}, {"frequency_penalty": 2.0}],
        [{"frequency_penalty": -2.001}, {"frequency_penalty": 2.001}],
    ),
    "repetition_penalty": (
        [{"repetition_penalty": 0.01}, {"repetition_penalty": 2.0}],
        [{"repetition_penalty": 0.0}, {"repetition_penalty": 2.001}],
    ),
    "stop_token_ids": (
        [{"stop_token_ids": [0, VOCAB_SIZE - 1]}],
        [{"stop_token_ids": [VOCAB_SIZE]}, {"stop_token_ids": [-1]}],
    ),
    "allowed_token_ids": (
        [{"allowed_token_ids": [VOCAB_SIZE - 1]}],
        [{"allowed_token_ids": [VOCAB_SIZE]}, {"allowed_token_ids": [-1]}],
    ),
    "seed": ([{"seed": -INT64}, {"seed": INT64 - 1}], []),
}
INTEGERS = ("n", "logprobs", "max_tokens", "min_tokens", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


async def test_s11_each_bound_of_a_request_is_exact(pool: ScriptPool) -> None:
    wrong = []
    for name, (inside, outside) in BOUNDS.items():
        for values, wanted in [*((one, OK) for one in inside), *((one, INVALID) for one in outside)]:
            code, details = await send(pool.router.address, sampled(**values))
            if code is not wanted or (wanted is INVALID and not details.startswith(name)):
                wrong.append((values, code, details))
    assert wrong == []


async def test_s11_the_largest_numbers_and_those_that_are_none_are_refused_by_name(pool: ScriptPool) -> None:
    cases = [(name, number) for name in INTEGERS for number in (INT32 - 1, INT32, -INT32, INT64 - 1, -INT64)]
    cases += [(name, number) for name in FLOATS for number in (math.nan, math.inf, -math.inf, -1e30)]  # type: ignore[misc]
    wrong = []
    for name, number in cases:
        code, details = await send(pool.router.address, sampled(**{name: number}))
        is_large_top_k = name == "top_k" and number == INT32 - 1
        if code is not (OK if is_large_top_k else INVALID) or not (is_large_top_k or details.startswith(name)):
            wrong.append((name, number, code, details))
    assert wrong == []
    await still_answers(pool)


async def test_s11_token_ids_are_in_the_vocabulary_and_prompts_in_the_context(pool: ScriptPool) -> None:
    for ids, code in (
        ([0], OK),
        ([VOCAB_SIZE - 1], OK),
        ([VOCAB_SIZE], INVALID),
        ([-1], INVALID),
        ([INT64 - 1], INVALID),
        ([5] * (LONGEST - 1), OK),
        ([5] * LONGEST, INVALID),
    ):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=1))
        assert (await send(pool.router.address, request.SerializeToString()))[0] is code, ids[:3]


async def test_s12_a_message_of_4_mib_is_taken_and_one_byte_more_is_not(pool: ScriptPool) -> None:
    def padded(size: int) -> bytes:
        """Something to ignore, as a newer client's field would be, up to a size."""
        body = sampled()
        head = bytes([0xFA, 0x3F])  # field 1023, of bytes
        length = size - len(body) - len(head) - 4
        varint = bytes([length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21])
        return body + head + varint + bytes(length)

    for address in (pool.router.address, pool.replicas[0].server.address):
        for size, code in ((MESSAGE_BYTES - 1, OK), (MESSAGE_BYTES, OK), (MESSAGE_BYTES + 1, EXHAUSTED)):
            raw = padded(size)
            assert len(raw) == size
            assert (await send(address, raw))[0] is code, (address, size)


async def test_s12_deep_nesting_and_a_million_entries_end_with_a_status(pool: ScriptPool) -> None:
    address = pool.router.address
    assert (await send(address, b"\x0b" * 100_000))[0] is INVALID  # groups in groups
    inner = b""
    for _ in range(5000):  # messages in messages
        size = len(inner)
        inner = (
            b"\x22"
            + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]))
            + inner
        )
    code, _ = await send(address, inner)
    assert code in (OK, INVALID)
    many = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 1_000_000))
    assert (await send(address, many.SerializeToString()))[0] is INVALID
    stops = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["s"] * 1_000_000))
    assert (await send(address, stops.SerializeToString()))[0] is INVALID
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="")] * 500_000)
    assert (await send(address, chat.SerializeToString(), CHAT))[0] in (INVALID, EXHAUSTED)
    await still_answers(pool)


async def test_s12_metadata_has_8_kib(pool: ScriptPool) -> None:
    assert (await send(pool.router.address, sampled(), metadata=(("x-note", "v" * 6000),)))[0] is OK
    code, _ = await send(pool.router.address, sampled(), metadata=(("x-note", "v" * 16_500),))
    assert code is EXHAUSTED
    await still_answers(pool)


async def test_s12_compressed_messages_are_refused_before_they_grow(pool: ScriptPool) -> None:
    small = sampled()
    assert (await send(pool.router.address, small, compression=grpc.Compression.Gzip))[0] in (
        grpc.StatusCode.UNIMPLEMENTED,
        OK,  # gRPC sends what does not shrink as it is
    )
    bomb = message(gzip.compress(bytes(40 << 20), 9), is_compressed=True)
    assert len(bomb) < 60_000  # fits what a stream may send unasked
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for address in (pool.router.address, pool.replicas[0].server.address):
        connection = await RawConnection.open(address)
        await connection.send(
            frame(HEADERS, END_HEADERS, 1, grpc_headers(GENERATE, **{"grpc-encoding": "gzip"})),
            *(frame(DATA, 0, 1, bomb[at : at + 16_000]) for at in range(0, len(bomb), 16_000)),
            frame(DATA, END_STREAM, 1),
        )
        received = await connection.read()
        while received is not None and received.stream != 1:
            received = await connection.read()
        assert received is not None
        assert (received.kind, received.flags & END_STREAM) == (HEADERS, END_STREAM)  # a status, and nothing before it
        await connection.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 64 << 20
    await still_answers(pool)


async def test_s13_streams_that_are_reset_at_once_leave_nothing_behind_and_others_are_answered(
    pool: ScriptPool,
) -> None:
    connection = await RawConnection.open(pool.router.address)
    body = message(sampled(max_tokens=200))
    started_s = time.perf_counter()
    worst_s, number = 0.0, 1
    for _ in range(40):
        frames = []
        for _ in range(100):
            frames += [
                frame(HEADERS, END_HEADERS, number, grpc_headers(GENERATE)),
                frame(DATA, END_STREAM, number, body),
                frame(RST_STREAM, 0, number, (8).to_bytes(4)),
            ]
            number += 2
        try:
            await connection.send(*frames)
        except ConnectionError:
            break
        asked_s = time.perf_counter()
        await still_answers(pool)
        worst_s = max(worst_s, time.perf_counter() - asked_s)
    assert time.perf_counter() - started_s < 60
    assert worst_s < 5
    await connection.close()
    await until(lambda: pool.router.pool.num_live == 0, 20)
    await until(lambda: pool.replicas[0].server.num_live == 0, 20)


async def test_s13_more_streams_than_the_limit_do_not_start(pool: ScriptPool) -> None:
    connection = await RawConnection.open(pool.router.address)
    limit = 0
    while (received := await connection.read()) is not None:
        if received.kind == 4 and not received.flags:
            settings = [received.payload[at : at + 6] for at in range(0, len(received.payload), 6)]
            limit = next(int.from_bytes(one[2:]) for one in settings if int.from_bytes(one[:2]) == 3)
            break
    assert limit == 4096 + 64
    await connection.close()


async def test_s13_headers_that_never_end_cost_their_own_connection_alone(pool: ScriptPool) -> None:
    slow = [await RawConnection.open(pool.router.address) for _ in range(20)]
    for connection in slow:
        await connection.send(frame(HEADERS, 0, 1, literal("x", "y")))  # without END_HEADERS
    await still_answers(pool)
    endless = await RawConnection.open(pool.router.address)
    await endless.send(frame(HEADERS, 0, 1, grpc_headers(GENERATE)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for _ in range(2000):  # 32 MB of them
            await endless.send(frame(CONTINUATION, 0, 1, literal("x", "y" * 16_000)))
    except ConnectionError:
        pass
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 24 << 20
    await still_answers(pool)
    for connection in (*slow, endless):
        await connection.close()


async def test_s13_pings_without_end_close_the_connection_that_sends_them(pool: ScriptPool) -> None:
    connection = await RawConnection.open(pool.router.address)
    try:
        for _ in range(200):
            await connection.send(*(frame(PING, 0, 0, bytes(8)) for _ in range(50)))
            await asyncio.sleep(0.001)
    except ConnectionError:
        pass
    assert await connection.closed_within(10)
    await still_answers(pool)


async def test_s13_connections_have_a_cap_and_idle_ones_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_CONNECTIONS", 40)
    monkeypatch.setattr(transport, "IDLE_TIMEOUT_S", 1)
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 1)
    async with script_pool() as pool:
        await still_answers(pool)
        idle = [await RawConnection.open(pool.router.address) for _ in range(80)]
        await still_answers(pool)  # over the connection it has
        kept = 0
        for connection in idle:
            received = await connection.read(2)
            kept += received is not None
        assert kept <= 40
        assert all(await asyncio.gather(*(connection.closed_within(15) for connection in idle)))
        for connection in idle:
            await connection.close()
        await until_answered(pool)


async def test_s13_a_connection_that_never_says_anything_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 1)
    async with script_pool() as pool:
        silent = [await RawConnection.open(pool.router.address, preface=False) for _ in range(30)]
        half = await RawConnection.open(pool.router.address, preface=False)
        await half.send(b"PRI * HTTP/2.0\r\n")
        assert all(await asyncio.gather(*(one.closed_within(15) for one in (*silent, half))))
        await still_answers(pool)


@pytest.mark.slow
async def test_s13_ten_thousand_connections_over_the_cap_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 12_000:
        pytest.skip("this machine allows too few open files")
    monkeypatch.setattr(transport, "MAX_CONNECTIONS", 256)
    try:
        async with script_pool() as pool:
            await still_answers(pool)
            opened: list[RawConnection] = []
            for _ in range(100):
                opened += await asyncio.gather(*(RawConnection.open(pool.router.address) for _ in range(100)))
            await still_answers(pool)
            for connection in opened:
                await connection.close()
            await until_answered(pool)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until_answered(pool: ScriptPool) -> None:
    """A new client gets through once the others are gone."""
    for _ in range(100):
        code, _ = await send(pool.router.address, sampled())
        if code is OK:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no new connection was taken")


async def test_s13_a_tls_handshake_that_is_never_finished_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 1)
    async with secured_pool(secured(tmp_path, acme={}), tls=True) as pool:
        silent = [await RawConnection.open(pool.router.address, preface=False) for _ in range(20)]
        half = await RawConnection.open(pool.router.address, preface=False)
        await half.send(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello
        plain = await RawConnection.open(pool.router.address)
        assert all(await asyncio.gather(*(one.closed_within(15) for one in (*silent, half, plain))))
        await still_answers(pool)


async def test_s13_callers_of_the_metrics_that_send_nothing_or_too_slowly_do_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "IDLE_S", 1.0)
    monkeypatch.setattr(http._QuietRequest, "timeout", 1.0)
    async with script_pool(router=replace(FAST, metrics_listen="127.0.0.1:0")) as pool:
        address = pool.router.metrics_address
        silent = [await RawConnection.open(address, preface=False) for _ in range(http.MAX_CALLERS - 4)]
        for connection in silent[:10]:
            await connection.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        assert "graphpool_streams" in await asyncio.to_thread(fetch, address)
        flood = [await RawConnection.open(address, preface=False) for _ in range(200)]
        assert all(await asyncio.gather(*(one.closed_within(15) for one in (*silent, *flood))))
        long = await RawConnection.open(address, preface=False)
        await long.send(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
        assert await long.closed_within(15)
        assert "graphpool_streams" in await asyncio.to_thread(fetch, address)
