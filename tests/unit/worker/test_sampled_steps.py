"""Sampled requests through the whole engine: run-ahead goes on, and neither graphs, company nor preemption change them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.fakes.tiny_model import EOS, VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

MODEL = tiny_model()
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "cut": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.4},
    "bias": {"temperature": 0.7, "logit_bias": {9: 5.0, 200: -3.0}},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    "log-probabilities": {"temperature": 0.0, "logprobs": 4},
    "minimum": {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": tuple(range(60))},
}

Answers = dict[tuple[str, int], tuple[list[int], list[list[int]]]]
"""The tokens of each choice, and the likeliest ones at each place."""


def request(name: str, kind: str, **changes: Any) -> GenerateRequest:
    values = {"seed": len(name), "max_tokens": 24, "ignore_eos": kind != "minimum"} | KINDS[kind] | changes
    prompt = tuple((7 * i + len(name)) % VOCAB for i in range(3 + len(name)))
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values))


def answers(engine: Engine, *requests: GenerateRequest) -> Answers:
    for one in requests:
        engine.add(one)
    found: Answers = defaultdict(lambda: ([], []))
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            tokens, logprobs = found[event.request_id, event.index]
            tokens += event.token_ids
            logprobs += [[token for token, _ in one.top] for one in event.logprobs]
    return dict(found)


@pytest.fixture(scope="module")
def graphs() -> Engine:
    engine = tiny_engine(MODEL, graphs="fake", max_batch=4, capture="startup")
    assert isinstance(engine.runner, GraphRunner)
    engine.runner.prepare_all()
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(graphs: Engine, kind: str) -> None:
    for name in ("one", "other"):
        graphs.add(request(name, kind, max_tokens=20, min_tokens=20))
    for _ in range(4):
        graphs.step()
    table = graphs.runner.eager.sampling.table  # type: ignore[attr-defined]
    uploads, ahead = table.num_uploads, 0
    while graphs.has_work:
        graphs.step()
        ahead += len(graphs._under_way)
    assert ahead >= 15
    assert table.num_uploads <= uploads + 1  # the one that began first ends first


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_company_change_nothing(graphs: Engine, kind: str) -> None:
    subject = request("subject", kind, n=2)
    alone = answers(tiny_engine(MODEL, max_batch=4), subject)
    assert answers(graphs, subject) == alone
    company = [request(f"company {other}", other) for other in KINDS if other != kind]
    crowded = answers(graphs, *company[:2], subject, *company[2:])
    assert {key: value for key, value in crowded.items() if key[0] == "subject"} == alone
    assert crowded == answers(tiny_engine(MODEL, max_batch=4), *company[:2], subject, *company[2:])


def test_greedy_batches_do_not_touch_the_stage(graphs: Engine) -> None:
    runner = graphs.runner
    assert isinstance(runner, GraphRunner)
    replays = sum(count for key, count in runner.dispatcher.replays.items() if key.phase == "sample")
    answers(graphs, *(request(name, "temperature", temperature=0.0) for name in ("a", "bb", "ccc")))
    assert sum(count for key, count in runner.dispatcher.replays.items() if key.phase == "sample") == replays


def test_a_sampled_row_costs_a_stage_of_its_own_size(graphs: Engine) -> None:
    runner = graphs.runner
    assert isinstance(runner, GraphRunner)
    before = dict(runner.dispatcher.replays)
    greedy = [request(name, "temperature", temperature=0.0) for name in ("a", "bb", "ccc")]
    answers(graphs, *greedy, request("dddd", "cut"))
    used = {
        key.bucket
        for key, count in runner.dispatcher.replays.items()
        if count > before.get(key, 0) and key.phase == "sample"
    }
    assert used == {1}


@pytest.mark.parametrize("ahead", ["fake", "off"])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(ahead: str) -> None:
    requests = [request("x" * (5 + number), kind, max_tokens=60) for number, kind in enumerate(KINDS)]
    roomy = answers(tiny_engine(MODEL, max_batch=8), *requests)
    tight = tiny_engine(MODEL, graphs=ahead, max_batch=8, kv_cache_bytes=90_000, prefix_cache=False)
    if isinstance(tight.runner, GraphRunner):
        tight.runner.prepare_all()
    assert answers(tight, *requests) == roomy
    assert tight.load().preemptions > 0


def test_a_sampled_answer_that_stops_wastes_one_row_and_spoils_none() -> None:
    stops = [
        request("x" * (5 + number), kind, ignore_eos=False, logit_bias={EOS: 4.0}, max_tokens=40)
        for number, kind in enumerate(KINDS)
    ]
    engine = tiny_engine(MODEL, graphs="fake", max_batch=4)
    assert isinstance(engine.runner, GraphRunner)
    engine.runner.prepare_all()
    assert answers(engine, *stops) == answers(tiny_engine(MODEL, max_batch=4), *stops)
    assert engine.num_wasted_rows > 0
