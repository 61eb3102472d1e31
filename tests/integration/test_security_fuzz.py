"""Five thousand requests that no sane client sends: each ends with a clear status, and nothing restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from tests.fakes.fuzz import METHODS, requests
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, script_pool
from tests.fakes.waiting import until

NUM_REQUESTS, AT_ONCE = 5000, 16
CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}
"""Cancelled: Abort is one of the methods, and may find the request of another's id under way."""


async def send(channel: grpc.aio.Channel, method: str, raw: bytes) -> tuple[grpc.StatusCode, str]:
    path = f"/graphpool.v1.{method}"
    call = channel.unary_stream(path)(raw, timeout=30)  # type: ignore[call-arg]
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    return await call.code(), await call.details() or ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_five_thousand_fuzzed_requests_all_get_a_clear_status_and_nothing_restarts(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Methods that stream from the client get one message and then the end."""
    knobs = ScriptKnobs(step_s=0.0005, tokens_per_step=256, max_rows=64)
    async with script_pool(knobs=knobs, router=replace(FAST, reconnect_max_s=5.0)) as pool:
        spawned = await pool.spawn("other", step_s=0.0005, tokens_per_step=256)
        before = {load.replica: load.incarnation for load in pool.router.pool.loads()}
        targets = [pool.router.address, pool.replicas[0].server.address, spawned.address]
        queue = iter(enumerate(requests(seed, NUM_REQUESTS)))
        outcomes: Counter[tuple[str, str]] = Counter()
        wrong: list[object] = []

        async def worker(channels: list[grpc.aio.Channel]) -> None:
            for number, (method, raw) in queue:
                code, details = await send(channels[number % len(channels)], method, raw)
                outcomes[method, code.name] += 1
                if code not in CLEAR or len(details.encode()) > 1024:
                    wrong.append((method, code, details, raw[:200]))

        channels = [grpc.aio.insecure_channel(target) for target in targets]
        await asyncio.gather(*(worker(channels) for _ in range(AT_ONCE)))
        for channel in channels:
            await channel.close(None)
        assert wrong == []
        assert sum(outcomes.values()) == NUM_REQUESTS
        assert {method for method, _ in outcomes} == METHODS.keys()
        assert outcomes["GenerationService/Generate", "OK"] > 0
        await until(lambda: pool.num_ready >= 2, 20)
        after = {load.replica: load.incarnation for load in pool.router.pool.loads()}
        assert {name: after[name] for name in before} == before  # nobody restarted
        assert spawned.process.returncode is None
        assert pool.replicas[0].failures == []
        await until(lambda: pool.router.pool.num_live == 0, 20)
        answer = await pool.client.generate((10, 20), max_tokens=3)
        assert len(answer.choices[0].token_ids) == 3
    assert "unplanned" not in caplog.text
