"""The worker's graphs on a real GPU: every key equals eager, at every edge, and steps neither synchronise nor allocate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.graphs.sync_counter import SyncCounter, SyncKind
from worker.load import GraphReadiness
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(device="cuda", hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.fixture(scope="module")
def captured(model: Any) -> Iterator[tuple[Engine, GraphRunner]]:
    # Without the prefix cache: a test plants NaN in all of the pool, cached blocks too.
    engine = tiny_engine(model, max_batch=8, prefix_cache=False)
    assert isinstance(engine.runner, GraphRunner)
    engine.runner.prepare_all()
    yield engine, engine.runner
    engine.runner.session.close()


def eager(model: Any) -> Engine:
    return tiny_engine(model, max_batch=8, graphs="off")


def request(name: str, length: int, **params: Any) -> GenerateRequest:
    prompt = tuple((7 * i + length) % VOCAB for i in range(length))
    values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values))


def answers(engine: Engine, requests: list[GenerateRequest]) -> Answers:
    for one in requests:
        engine.add(one)
    found: Answers = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
    return found


def test_every_key_is_captured_and_agrees_with_eager(captured: tuple[Engine, GraphRunner]) -> None:
    runner = captured[1]
    assert not runner.dispatcher.quarantined, runner.dispatcher.quarantined
    assert not runner.dispatcher.dropped, runner.dispatcher.dropped
    assert runner.readiness is GraphReadiness.FULL


@pytest.mark.parametrize("edge", [16, 32, 64, 128])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8])
def test_lengths_and_batches_at_every_edge_equal_eager(
    model: Any, captured: tuple[Engine, GraphRunner], edge: int, offset: int, batch: int
) -> None:
    engine, runner = captured
    engine.kv_cache.storage.fill_(torch.nan)  # in free blocks and in the padding block
    length = min(edge + offset, 128) - 4
    requests = [request(str(i), max(length - i, 1), max_tokens=4) for i in range(batch)]
    misses = sum(runner.dispatcher.misses.values())
    assert answers(engine, requests) == answers(eager(model), requests)
    assert sum(runner.dispatcher.misses.values()) == misses


def test_sampling_penalties_choices_and_logprobs_equal_eager(model: Any, captured: tuple[Engine, GraphRunner]) -> None:
    requests = [
        request("random", 9, temperature=1.0, seed=3, top_p=0.9),
        request("choices", 12, temperature=0.8, n=3, seed=4, top_k=20),
        request("penalised", 7, repetition_penalty=1.4, logprobs=2),
    ]
    assert answers(captured[0], requests) == answers(eager(model), requests)


def test_capturing_between_steps_changes_no_token(model: Any) -> None:
    engine = tiny_engine(model, max_batch=8)
    requests = [request(str(i), 5 + 9 * i, max_tokens=40) for i in range(6)]
    for one in requests:
        engine.add(one)
    found: Answers = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
        for event in engine.flush():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
        engine.prepare_next()
    assert found == answers(eager(model), requests)


def test_greedy_steps_never_wait_for_the_whole_device(captured: tuple[Engine, GraphRunner]) -> None:
    engine, _ = captured
    with SyncCounter() as syncs:
        answers(engine, [request(str(i), 20 + i, max_tokens=30) for i in range(8)])
    kinds = {call.kind for call in syncs.calls}
    assert kinds == {SyncKind.EVENT}, syncs.calls


def test_ten_thousand_steps_allocate_nothing_and_always_replay(captured: tuple[Engine, GraphRunner]) -> None:
    engine, runner = captured
    answers(engine, [request("warm", 20)])
    misses = sum(runner.dispatcher.misses.values())
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    steps = engine.load().steps
    number = 0
    while engine.load().steps - steps < 10_000:
        while len(engine.live_request_ids) < 8:
            number += 1
            engine.add(request(f"n{number}", 1 + number % 90, max_tokens=1 + number % 37))
        engine.step()
    while engine.has_work:
        engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert sum(runner.dispatcher.misses.values()) == misses
