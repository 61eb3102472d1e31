"""The prefix cache as clients see it: a tiny model behind a router, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.config import ReplicaConfig
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from protos import control_pb2, control_pb2_grpc
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.script_pool import script_pool
from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.engine_thread import EngineThread

PROMPT = list(range(10, 30))


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    """To a router with one replica around a tiny model: blocks of four tokens, no tokenizer."""
    events = EventFanout()
    engine = EngineThread(tiny_engine(tiny_model()), events)
    async with script_pool(num_replicas=0) as pool:
        config = replace(ReplicaConfig(), routers=(pool.router.address,))
        server = ReplicaServer(config, engine, events=events)
        await server.start()
        await pool.router.wait_ready(1, timeout_s=10)
        async with grpc.aio.insecure_channel(pool.router.address) as connected:
            yield connected
        await server.stop()
        engine.stop()


async def ask(channel: Any, **fields: Any) -> pb.GenerateResponse:
    sampling = pb.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling, **fields)
    answer: pb.GenerateResponse = await GenerationServiceStub(channel).Generate(request, timeout=20)
    return answer


async def test_a_repeated_prompt_is_cached_within_its_salt_and_not_for_who_opts_out(channel: Any) -> None:
    cached, tokens = [], set()
    for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"use_prefix_cache": False}):
        answer = await ask(channel, **fields)
        cached.append(answer.usage.cached_tokens)
        tokens.add(tuple(answer.choices[0].token_ids))
    assert cached == [0, 16, 0, 16, 0]
    assert len(tokens) == 1


async def test_hits_are_counted_in_the_load(channel: Any) -> None:
    control = control_pb2_grpc.ControlServiceStub(channel)

    async def counts() -> tuple[int, int]:
        found = await control.GetLoads(control_pb2.GetLoadsRequest(), timeout=10)
        load = found.replicas[0].load
        return load.prefix_cache_queries, load.prefix_cache_hits

    await ask(channel)
    await ask(channel)
    for _ in range(500):  # replicas report every so often
        queries, hits = await counts()
        if hits:
            break
        await asyncio.sleep(0.02)
    assert hits == 16
    assert queries >= 40  # the router's own canary is in it


async def test_a_salt_that_is_too_long_is_refused_by_name(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(channel, cache_salt="s" * 257)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cache_salt" in (caught.value.details() or "")
