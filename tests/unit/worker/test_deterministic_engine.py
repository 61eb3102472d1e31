"""With `deterministic`, the logits after some tokens have the same bits however an engine came to compute them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.logit_record import LogitRecord
from tests.fakes.one_thread import one_thread  # noqa: F401
from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.engine import Engine
from worker.load_causal_lm import ServedModel
from worker.request import GenerateRequest
from worker.sampling import SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "num_heads": 6, "num_kv_heads": 2, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True, "num_kv_heads": 1},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 16, "num_kv_heads": 4},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "intermediate_size": 50, "vocab_size": 203},
}
LONG: dict[str, Any] = {"max_position_embeddings": 640}
SHARED = tuple(random.Random(5).choices(range(4, 200), k=40))


def engine(model: ServedModel, **changes: Any) -> Engine:
    return tiny_engine(model, deterministic=True, **changes)


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Half of them begin alike, so that prefix caches have something to find."""
    own = tuple(rng.choices(range(4, 200), k=length))
    return (SHARED + own)[:length] if rng.random() < 0.5 else own


def request(name: str, tokens: tuple[int, ...], **params: Any) -> GenerateRequest:
    values = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params}
    return GenerateRequest(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**values))


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_chunks_cache_tiers_and_runner_leave_every_bit_alone(family: str) -> None:
    model, record, rng = tiny_model(**FAMILIES[family]), LogitRecord(), random.Random(3)
    requests = [request(str(n), prompt(rng, rng.choice([1, 5, 16, 17, 40, 90]))) for n in range(7)]
    alone: dict[Any, Any] = {}
    for one in requests:
        alone |= record.run(engine(model), [one])
    ways: list[dict[str, Any]] = [
        {},
        {"max_batch": 2},
        {"max_batch": 3, "buckets": (1, 3)},
        {"prefill_chunk": 64, "prefix_cache": False},
        {"prefill_chunk": 4, "block_size": 4},
        {"block_size": 16, "prefill_chunk": 32, "tiers": (16, 32, 64, 128)},
        {"graphs": "fake", "capture": "startup"},
    ]
    for way in ways:
        tested = engine(model, **way)
        while way.get("graphs") and tested.prepare_next():
            pass
        assert record.run(tested, requests) == alone, way
    assert {"eager", "graph"} <= record.runners
    assert record.num_compared > 500


def test_prompts_longer_than_a_key_tile() -> None:
    model, record, rng = tiny_model(**LONG), LogitRecord(), random.Random(4)
    requests = [request(str(n), prompt(rng, length), max_tokens=6) for n, length in enumerate([250, 256, 300, 600])]
    first = record.run(engine(model), requests)
    for way in ({"prefill_chunk": 512, "max_batch": 1}, {"graphs": "fake", "prefill_chunk": 128}):
        tested = engine(model, **way)
        while way.get("graphs") and tested.prepare_next():
            pass
        assert record.run(tested, requests) == first
    for one in requests:  # what decode computed, as the end of a prompt
        longer = one.prompt_token_ids + tuple(first[one.request_id, 0])
        record.run(engine(model), [request("r", longer[:-1], max_tokens=1)])


def test_every_generated_token_has_the_bits_of_a_prompt_token() -> None:
    model, record = tiny_model(), LogitRecord()
    answer = record.run(engine(model), [request("r", SHARED[:9], max_tokens=30)])["r", 0]
    before = record.num_compared
    for taken in range(1, 30):
        again = record.run(engine(model), [request("r", (*SHARED[:9], *answer[:taken]), max_tokens=30 - taken)])
        assert again["r", 0] == answer[taken:]
    assert record.num_compared - before > 400


def test_delivered_tokens_go_on_as_if_nothing_had_happened() -> None:
    model, record = tiny_model(), LogitRecord()
    params = {"temperature": 1.3, "seed": 11, "max_tokens": 20, "presence_penalty": 0.7, "n": 2}
    whole = record.run(engine(model), [request("r", SHARED[:6], **params)])
    for taken in range(1, 20):
        delivered = tuple(tuple(whole["r", index][:taken]) for index in range(2))
        resumed = GenerateRequest(
            request_id="r",
            prompt_token_ids=SHARED[:6],
            sampling=request("r", SHARED[:6], **params).sampling,
            delivered=delivered,
        )
        answers = record.run(engine(model), [resumed])
        assert {key: [*delivered[key[1]], *tokens] for key, tokens in answers.items()} == whole


def test_preemption_recomputes_the_same_bits() -> None:
    model, record, rng = tiny_model(), LogitRecord(), random.Random(8)
    requests = [request(str(n), prompt(rng, 30), max_tokens=40) for n in range(6)]
    roomy = record.run(engine(model), requests)
    tight = engine(model, kv_cache_bytes=2 * 2 * 2 * 4 * 8 * 4 * 45, prefix_cache=False)
    assert record.run(tight, requests) == roomy
    assert tight.scheduler.num_preemptions > 0


def test_threads_leave_every_bit_alone() -> None:
    model, record, rng = tiny_model(), LogitRecord(), random.Random(9)
    requests = [request(str(n), prompt(rng, 33), max_tokens=4) for n in range(3)]
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        answers.append(record.run(engine(model), requests))
    assert answers[0] == answers[1] == answers[2]


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_sampled_answers_are_those_of_a_request_alone(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1000)))
    family = data.draw(st.sampled_from(list(FAMILIES)))
    model, record = tiny_model(**FAMILIES[family]), LogitRecord()
    sampled = request(
        "sampled",
        prompt(rng, data.draw(st.integers(1, 60))),
        temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        seed=data.draw(st.integers(0, 2**32)),
        top_p=data.draw(st.sampled_from([1.0, 0.9])),
        top_k=data.draw(st.sampled_from([0, 5])),
        n=data.draw(st.sampled_from([1, 4])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
        logprobs=data.draw(st.sampled_from([None, 3])),
        stop_token_ids=data.draw(st.sampled_from([(), tuple(range(0, 200, 21))])),
    )
    others = [request(str(n), prompt(rng, rng.randrange(1, 70)), temperature=1.0, seed=n) for n in range(7)]
    alone = record.run(engine(model), [sampled])
    logprobs = record.logprobs
    size = data.draw(st.sampled_from([1, 3, 7]))
    chunk = data.draw(st.sampled_from([4, 16, 64]))
    beside = record.run(engine(model, prefill_chunk=chunk), [*others[:size], sampled, *others[size:]])
    assert {key: beside[key] for key in alone} == alone
    assert {key: record.logprobs[key] for key in alone} == logprobs


def test_the_fast_mode_is_what_this_guards_against() -> None:
    """The same comparison fails without `deterministic`: it can tell."""
    model, record, rng = tiny_model(**LONG, hidden_size=64), LogitRecord(), random.Random(3)
    requests = [request(str(n), prompt(rng, rng.choice([5, 40, 90, 300]))) for n in range(8)]
    record.run(tiny_engine(model, max_batch=1), requests)
    with pytest.raises(AssertionError, match="other bits"):
        record.run(tiny_engine(model, max_batch=8), requests)


def test_the_model_is_described_as_deterministic() -> None:
    assert engine(tiny_model()).info.is_deterministic
    assert not tiny_engine(tiny_model()).info.is_deterministic
