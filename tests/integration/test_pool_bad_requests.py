"""The corpus of bad requests against a router and against a replica, with a neighbour that must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient
from tests.fakes.bad_requests import Case, Outcome, Target, load_cases, run_case
from tests.fakes.script_engine import CONTROL_IDS, TIERS, VOCAB_SIZE, ScriptKnobs, script
from tests.fakes.script_pool import ONE_TRY, script_pool
from tests.fakes.waiting import until

NEIGHBOUR = (40, 41, 42)
CASES = load_cases()


@pytest.fixture(params=["router", "replica"])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """A server that is ready; override it to run the corpus against another model."""
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.0005)) as pool:
        address = pool.router.address if request.param == "router" else pool.replicas[0].server.address
        yield Target(
            address=address,
            vocab_size=VOCAB_SIZE,
            max_model_len=TIERS[-1],
            control_tokens=CONTROL_IDS,
            properties=frozenset({"strict_template", "speed"}),
        )
        await until(lambda: pool.replicas[0].engine.load().running == 0)
        assert pool.replicas[0].failures == []


async def best_of_three(channel: grpc.aio.Channel, target: Target, case: Case) -> Outcome:
    """The quickest: a busy machine may hold any one of them up."""
    outcomes = [await run_case(channel, target, case)]
    while not outcomes[-1].was_prompt and len(outcomes) < 3:
        outcomes.append(await run_case(channel, target, case))
    assert len({(outcome.code, outcome.details) for outcome in outcomes}) == 1
    return min(outcomes, key=lambda outcome: outcome.seconds)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_a_bad_request_is_refused_at_once_by_name_and_its_neighbour_goes_on(case: Case, target: Target) -> None:
    if not target.properties.issuperset(case.needs):
        pytest.skip(f"needs {', '.join(case.needs)}")
    options = [("grpc.max_send_message_length", -1)]
    async with (
        AsyncGraphpoolClient(target.address, ONE_TRY) as client,
        grpc.aio.insecure_channel(target.address, options=options) as channel,
    ):
        neighbour = asyncio.create_task(client.generate(NEIGHBOUR, max_tokens=100, seed=3))
        await channel.channel_ready()
        outcome = await best_of_three(channel, target, case)
        assert (await neighbour).token_ids == script(NEIGHBOUR, 3, 0, 100)
    assert outcome.code == case.code, outcome.details
    if case.code != "OK":
        assert outcome.details.startswith(case.field)
        assert len(outcome.details.encode()) <= 1024
        assert outcome.was_prompt, outcome.seconds


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 90
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.code == "OK" for case in CASES) >= 15


async def test_control_tokens_in_text_stay_text(target: Target) -> None:
    hostile = "".join(target.control_tokens)
    control_ids = set(target.control_tokens.values())
    async with AsyncGraphpoolClient(target.address, ONE_TRY) as client:
        ids = await client.tokenize(hostile, add_special_tokens=False)
        plain = await client.tokenize(messages=[("system", "x"), ("user", "x")])
        chat = await client.tokenize(messages=[("system", hostile), ("user", hostile)])
    assert control_ids.isdisjoint(ids)
    assert [token for token in chat if token in control_ids] == [token for token in plain if token in control_ids]


async def test_what_a_prompt_says_is_in_no_error(target: Target) -> None:
    secret = "canary-7f3a"
    prompts: list[dict[str, Any]] = [
        {"text": secret * 100_000},
        {"text": secret, "sampling": {"n": 0}},
        {"text": secret, "model": "x"},
    ]
    cases = [Case(name="x", method="Generate", code="", request=request) for request in prompts]
    messages = [{"role": "user", "content": secret}, {"role": secret[:8], "content": secret}]
    cases.append(Case(name="x", method="Chat", code="", request={"messages": messages}))
    cases.append(Case(name="x", method="Chat", code="", request={"messages": [messages[0], messages[0]]}))
    async with grpc.aio.insecure_channel(target.address) as channel:
        outcomes = [await run_case(channel, target, case) for case in cases]
    assert all(outcome.code in ("INVALID_ARGUMENT", "NOT_FOUND") for outcome in outcomes)
    assert all("canary" not in outcome.details + str(outcome.trailers) for outcome in outcomes)
