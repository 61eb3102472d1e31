"""Each request's tokens are what it gets alone, whatever runs beside it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.request import ChoiceDelta, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams

MODEL = tiny_model()
Answers = dict[tuple[str, int], list[int]]


def drain(engine: Engine, answers: Answers) -> None:
    for event in engine.step():
        assert isinstance(event, ChoiceDelta), event
        answers[event.request_id, event.index] += event.token_ids


def alone(request: GenerateRequest) -> Answers:
    answers: Answers = defaultdict(list)
    engine = tiny_engine(MODEL)
    engine.add(request)
    while engine.has_work:
        drain(engine, answers)
    return answers


@st.composite
def sampling(draw: st.DrawFn, room: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(st.integers(1, min(room, 24))),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 3.0])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        top_k=draw(st.sampled_from([0, 1, 7, 50])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        seed=draw(st.integers(-(2**40), 2**40)),
        n=draw(st.sampled_from([1, 1, 1, 3])),
        ignore_eos=draw(st.booleans()),
        min_tokens=0,
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        logit_bias=draw(st.sampled_from([{}, {5: 3.0, 200: -100.0}])),
    )


@dataclass
class Visit:
    request: GenerateRequest
    arrives: int
    cancelled_after: int | None


@st.composite
def visits(draw: st.DrawFn) -> list[Visit]:
    made = []
    for number in range(draw(st.integers(2, 12))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60))
        request = GenerateRequest(
            request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=draw(sampling(127 - len(prompt)))
        )
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 20)))
        made.append(Visit(request, draw(st.integers(0, 25)), cancelled))
    return made


@settings(max_examples=40, deadline=None)
@given(visits(), st.sampled_from([1, 3, 8]), st.sampled_from([4, 16, 64]), st.sampled_from([33, 60, 200]))
def test_every_row_equals_the_same_request_alone(
    company: list[Visit], max_batch: int, chunk: int, num_blocks: int
) -> None:
    block_bytes = 2 * 2 * 4 * 2 * 8 * 4
    engine = tiny_engine(MODEL, max_batch=max_batch, prefill_chunk=chunk, kv_cache_bytes=num_blocks * block_bytes)
    engine.kv_cache.storage.fill_(torch.nan)  # nothing that was not written may ever matter
    engine.kv_cache.scrub([0])
    answers: Answers = defaultdict(list)
    cancelled: set[str] = set()
    turn = 0
    while turn < 30 or engine.has_work:
        for visit in company:
            if visit.arrives == turn:
                engine.add(visit.request)
            if visit.cancelled_after is not None and turn == visit.arrives + visit.cancelled_after:
                events = engine.cancel(visit.request.request_id)
                cancelled |= {event.request_id for event in events if isinstance(event, RequestFailed)}
        drain(engine, answers)
        turn += 1
    for visit in company:
        for key, expected in alone(visit.request).items():
            got = answers[key]
            assert got == (expected[: len(got)] if visit.request.request_id in cancelled else expected)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


@pytest.mark.parametrize("edge", [16, 32, 64, 128])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8])
def test_lengths_at_tier_edges_and_batches_at_bucket_edges_equal_the_request_alone(
    edge: int, offset: int, batch: int
) -> None:
    length = min(edge + offset, 128)
    dice = random.Random(edge * 10 + offset)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(dice.randrange(VOCAB) for _ in range(length - 3 - i % 2)),
            sampling=SamplingParams(temperature=0, max_tokens=3 + i % 2, ignore_eos=True),
        )
        for i in range(batch)
    ]
    engine = tiny_engine(MODEL, prefill_chunk=64)
    answers: Answers = defaultdict(list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        drain(engine, answers)
    for request in requests[:2] + requests[-1:]:
        assert alone(request).items() <= answers.items()
