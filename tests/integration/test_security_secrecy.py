"""S17: what clients send and get is in no log, no metric, no error and no dump."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, CallError
from cluster.config import ClientConfig
from cluster.security.config import ClientSecurity
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.scrape import fetch
from tests.fakes.script_engine import ScriptKnobs, ScriptText, script, script_text
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.secured import secured, secured_pool
from tests.fakes.waiting import until
from worker.errors import InvalidRequest
from worker.text.template import ChatTemplate

CANARY = "CANARY-7f3a-do-not-log"
NAN_PROMPT = tuple(3 + byte for byte in (CANARY + " nan").encode())


@pytest.fixture
async def pool() -> AsyncIterator[ScriptPool]:
    knobs = ScriptKnobs(fail_on_prompt=NAN_PROMPT)
    async with script_pool(knobs=knobs, router=replace(FAST, metrics_listen="127.0.0.1:0")) as made:
        yield made


async def errors_of(pool: ScriptPool) -> list[str]:
    """Every way a request with the canary in it can fail; what the client was told."""
    told: list[str] = []
    client = pool.client

    async def note(call: Any) -> None:
        try:
            await call
        except (CallError, InvalidRequest) as error:
            told.append(str(error))

    for options in (
        {"n": 9},
        {"temperature": -1.0},
        {"stop": [CANARY * 20]},
        {"stop": ["", CANARY]},
        {"logit_bias": {10**9: 1.0}},
        {"max_tokens": 10**9},
        {"model": CANARY},
        {"request_id": f"{CANARY} with a space"},
    ):
        await note(client.generate(CANARY, **options))
    await note(client.generate(CANARY * 10_000))
    await note(client.generate([CANARY]))  # type: ignore[list-item]
    await note(client.chat([(CANARY, CANARY)]))
    await note(client.chat([{"role": "user", "content": CANARY, "extra": CANARY}, CANARY]))  # type: ignore[list-item]
    await note(client.tokenize(CANARY * 10_000))
    await note(client.generate(NAN_PROMPT, max_tokens=20))
    await note(client.generate(CANARY, timeout_s=0.001, max_tokens=4000))
    await note(client.abort(CANARY))
    await note(client.drain(CANARY, grace_s=0))
    async with grpc.aio.insecure_channel(pool.router.address) as channel:
        for raw in (b"\xff" + CANARY.encode(), b"\x1a\x40" + CANARY.encode(), CANARY.encode() * 300_000):
            call: Any = channel.unary_unary("/graphpool.v1.GenerationService/Generate")(raw, timeout=10)  # type: ignore[call-arg]
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call
            told.append(await call.details() or "")
    return told


async def test_s17_no_error_path_shows_the_prompt(pool: ScriptPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = await errors_of(pool)
    assert len(told) >= 15
    shown = [text for text in told if CANARY in text]
    # What names itself is named: an id or a replica that the client gave as one.
    assert [text for text in shown if "replica" not in text] == []
    assert all(len(text.encode()) < 1200 and "Traceback" not in text for text in told)
    assert_clean(caplog.text)
    assert_clean(await asyncio.to_thread(fetch, pool.router.metrics_address))


async def test_s17_an_error_nobody_planned_is_logged_by_its_place(
    pool: ScriptPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)

    def fail(_: ScriptText, text: str, **__: object) -> list[int]:
        raise RuntimeError(f"cannot encode {text}")

    monkeypatch.setattr(ScriptText, "encode", fail)
    with pytest.raises(CallError, match="an internal error") as caught:
        await pool.client.generate(CANARY)
    assert CANARY not in str(caught.value)
    assert "unplanned RuntimeError" in caplog.text
    assert_clean(caplog.text)


async def test_s17_a_replica_that_dies_with_a_prompt_leaves_it_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with script_pool(router=replace(FAST, metrics_listen="127.0.0.1:0")) as pool:
        spawned = await pool.spawn("doomed", step_s=0.02)
        streams = [pool.client.stream(CANARY, max_tokens=200, ignore_eos=True, temperature=0, seed=1) for _ in range(6)]
        for stream in streams:
            await stream.__anext__()
        await spawned.kill()
        await until(lambda: pool.num_ready == 1, 10)
        for stream in streams:
            stream.cancel()
        assert_clean(caplog.text)
        assert_clean(await asyncio.to_thread(fetch, pool.router.metrics_address))


async def test_s17_answers_are_in_no_log_either(pool: ScriptPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await pool.client.generate((10, 20, 30), max_tokens=60, temperature=0, seed=0)
    text = script_text(script((10, 20, 30), 0, 0, 60))
    assert answer.text == text
    for piece in (text[:12], text[-12:]):
        assert piece not in caplog.text


async def test_s17_neither_tokens_nor_tenants_prompts_show_with_security_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = secured(tmp_path, acme={"tokens_per_s": 50, "burst_tokens": 50})
    async with secured_pool(keys, metrics=True) as pool:
        for token in (keys.tokens["acme"], keys.tokens["acme"] + "x", CANARY):
            config = ClientConfig(max_attempts=1, security=ClientSecurity(token=token))
            async with AsyncGraphpoolClient(pool.router.address, config) as client:
                for _ in range(3):
                    with contextlib.suppress(CallError):
                        await client.generate(CANARY, max_tokens=40)
        assert_clean(caplog.text)
        for token in keys.tokens.values():
            assert token not in caplog.text
            assert token.split("_", 2)[2] not in caplog.text


def test_s17_a_template_cannot_quote_a_message_in_its_error() -> None:
    for source in (
        "{{ raise_exception('bad: ' + messages[0].content) }}",
        "{{ messages[0].content.missing.again }}",
        "{{ messages[0].content + 1 }}",
        "{% for m in messages %}{{ m.content|int(base=99) }}{{ 1 // 0 }}{% endfor %}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(source, {}).render([{"role": "user", "content": CANARY}])
        assert CANARY not in str(caught.value)


def test_s17_servers_write_no_core_dumps() -> None:
    code = (
        "import resource; from cluster.security.core_dumps import refuse_core_dumps; refuse_core_dumps();"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def assert_clean(text: str) -> None:
    lines = [line for line in text.splitlines() if CANARY in line or CANARY.lower() in line.lower()]
    assert lines == []


async def test_s17_a_request_that_the_engine_refuses_is_not_quoted(pool: ScriptPool) -> None:
    async with grpc.aio.insecure_channel(pool.replicas[0].server.address) as channel:
        request = pb.GenerateRequest(text=CANARY, sampling=pb.SamplingParams(stop_token_ids=[10**6]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).Generate(request, timeout=10)
        assert CANARY not in (caught.value.details() or "")
