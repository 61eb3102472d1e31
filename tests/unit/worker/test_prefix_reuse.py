"""Answers that start from cached blocks are those of a cold run: the whole engine around a tiny model in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.script_runner import script_engine
from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.errors import NumericalError
from worker.graph_runner import GraphRunner
from worker.request import ChoiceDelta, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams
from worker.sequence import Sequence

MODEL = tiny_model()
BLOCK = 4
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 8 * 4
Answers = dict[tuple[str, int], list[ChoiceDelta]]


def warm_engine(**options: Any) -> Engine:
    """Everything that was never written is NaN: reading any of it would show."""
    max_ahead = options.pop("max_ahead", 0)
    engine = tiny_engine(MODEL, **options)
    engine.kv_cache.storage.fill_(torch.nan)
    engine.kv_cache.scrub([0])
    if isinstance(engine.runner, GraphRunner):
        engine.runner.prepare_all()
    elif max_ahead:
        # A step ahead takes one first token from the device, so a prefill step serves one sequence, as with graphs.
        engine.runner.max_ahead, engine.scheduler.max_prefill_segments = max_ahead, 1
    return engine


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * place * place + place) % VOCAB for place in range(length))


def request(name: str, prompt: Iterable[int], **params: Any) -> GenerateRequest:
    own = {key: params.pop(key) for key in ("use_prefix_cache", "cache_salt") if key in params}
    values = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3} | params
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**values), **own)


def run(engine: Engine, *requests: GenerateRequest) -> Answers:
    for one in requests:
        engine.add(one)
    answers: Answers = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            answers[event.request_id, event.index].append(event)
    return answers


def tokens(deltas: list[ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def cold(one: GenerateRequest) -> Answers:
    return run(tiny_engine(MODEL, prefix_cache=False, max_batch=8), one)


def assert_equal(got: Answers, expected: Answers) -> None:
    """The same tokens, and the same log-probabilities but for rounding: a wrong context would change them by far more."""
    for key, deltas in expected.items():
        assert tokens(got[key]) == tokens(deltas), key
        for mine, theirs in zip(got[key], deltas, strict=True):
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


@pytest.mark.parametrize("blocks", [1, 3, 4, 8, 15])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("path", ["eager", "ahead", "graphs"])
def test_a_repeated_prompt_at_a_blocks_edge_is_answered_as_if_it_were_new(blocks: int, offset: int, path: str) -> None:
    engine = ENGINES[path]
    prompt = prompt_of(blocks * BLOCK + offset, seed=blocks)
    # Greedy answers without log-probabilities are the ones that run a step ahead.
    for seed, temperature, logprobs in ((0, 0.0, 3), (0, 0.0, None), (1, 1.0, 3)):
        one = request("r", prompt, seed=seed, temperature=temperature, logprobs=logprobs)
        expected = cold(one)
        run(engine, one)
        again = run(engine, one)
        assert_equal(again, expected)
        assert {delta.cached_tokens for delta in again["r", 0]} == {(len(prompt) - 1) // BLOCK * BLOCK}
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


@pytest.mark.parametrize("path", ["eager", "ahead", "graphs"])
@pytest.mark.parametrize("shared", [3, 4, 5, 16, 17, 31, 32, 33])
def test_a_prompt_that_parts_from_a_known_one_at_any_place_is_answered_as_if_it_were_new(
    shared: int, path: str
) -> None:
    engine, stem = ENGINES[path], prompt_of(shared, seed=100)
    first, second = request("a", (*stem, *prompt_of(30, seed=shared))), request("b", (*stem, *prompt_of(21, seed=5)))
    run(engine, first)
    for one in (second, replace(second, sampling=replace(second.sampling, logprobs=None))):
        answers = run(engine, one)
        assert_equal(answers, cold(one))
        assert answers["b", 0][0].cached_tokens >= shared // BLOCK * BLOCK


@pytest.mark.parametrize("path", ["eager", "ahead", "graphs"])
def test_a_conversation_continues_behind_its_last_answer(path: str) -> None:
    engine, history = ENGINES[path], list(prompt_of(9, seed=40))
    for turn in range(4):
        one = request(f"turn {turn}", history, max_tokens=11, logprobs=None)
        answers = run(engine, one)
        assert_equal(answers, cold(one))
        if turn:
            assert answers[one.request_id, 0][0].cached_tokens >= len(history) - 6 - BLOCK
        history += [*tokens(answers[one.request_id, 0]), 5, 6, 7, 8, turn]


@pytest.mark.parametrize("options", [{}, {"max_ahead": 1}, {"graphs": "fake", "capture": "startup"}])
@pytest.mark.parametrize("length", [11, 12, 13, 40])
def test_choices_share_the_blocks_of_their_prompt(options: dict[str, Any], length: int) -> None:
    engine = warm_engine(**options)
    one = request("r", prompt_of(length), temperature=1.0, seed=9, n=4, logprobs=None)
    launched: list[int] = []
    launch = engine.launch

    def counting(batch: Any) -> None:
        launched.append(batch.num_tokens if batch.phase == "prefill" else 0)
        launch(batch)

    engine.launch = counting  # type: ignore[method-assign]
    answers = run(engine, one)
    assert_equal(answers, cold(one))
    whole = (length - 1) // BLOCK * BLOCK
    assert sum(launched) == length + 3 * (length - whole)
    assert [answers["r", index][0].cached_tokens for index in range(4)] == [0, whole, whole, whole]
    load = engine.load()
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (4 * length, 3 * whole)


def test_penalties_and_seeds_see_the_cached_part_of_the_prompt() -> None:
    engine = warm_engine()
    for params in ({"repetition_penalty": 1.7}, {"presence_penalty": 2.0, "temperature": 1.0, "seed": 3}):
        one = request("r", prompt_of(23, seed=8), max_tokens=16, **params)
        run(engine, one)
        again = run(engine, one)
        assert again["r", 0][0].cached_tokens
        assert_equal(again, cold(one))


def test_every_cache_hit_is_replayed_from_a_graph() -> None:
    engine = warm_engine(graphs="fake", capture="startup")
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    for length in (5, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 120):
        prompt = prompt_of(length, seed=3)
        for suffix in ((), (1,), (2, 3, 4, 5, 6)):
            run(engine, request("r", (*prompt, *suffix), max_tokens=2, logprobs=None))
    load = engine.load()
    assert load.prefix_cache_hits > load.prefix_cache_queries // 2
    assert not runner.dispatcher.misses
    assert load.eager_steps == 0


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    engine = warm_engine(prefix_cache=False)
    one = request("r", prompt_of(20))
    run(engine, one)
    assert run(engine, one)["r", 0][0].cached_tokens == 0
    assert engine.scheduler.pool.num_cached == 0


def test_a_salt_and_an_opt_out_keep_answers_equal_and_blocks_apart() -> None:
    engine, prompt = warm_engine(), prompt_of(20)
    expected = cold(request("r", prompt))
    for options, cached in (({}, 0), ({"cache_salt": "a"}, 0), ({"use_prefix_cache": False}, 0), ({}, 16)):
        answers = run(engine, request("r", prompt, **options))
        assert_equal(answers, expected)
        assert answers["r", 0][0].cached_tokens == cached


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, GenerateRequest, int | None]]:
    """(turn, request, turn of its cancellation): prompts that begin alike, in threes and fours."""
    stems = [prompt_of(70, seed=seed) for seed in draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))]
    made = []
    for number in range(draw(st.integers(3, 12))):
        stem = draw(st.sampled_from(stems))[: draw(st.integers(1, 70))]
        prompt = (*stem, *draw(st.lists(st.integers(0, 5), max_size=3)))
        one = request(
            f"r{number}",
            prompt,
            max_tokens=draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            n=draw(st.sampled_from([1, 1, 3])),
            logprobs=None,
            use_prefix_cache=draw(st.sampled_from([True, True, True, False])),
            cache_salt=draw(st.sampled_from(["", "", "x"])),
        )
        turn = draw(st.integers(0, 20))
        made.append((turn, one, draw(st.one_of(st.none(), st.none(), st.integers(turn, turn + 25)))))
    return made


@settings(max_examples=30, deadline=None)
@given(
    arrivals(),
    st.sampled_from([2, 8]),
    st.sampled_from([4, 16, 64]),
    st.sampled_from([33, 45, 200]),
    st.sampled_from([0, 1]),
)
def test_under_pressure_chunks_cancellations_and_run_ahead_every_answer_is_that_of_a_cold_run(
    company: list[tuple[int, GenerateRequest, int | None]], max_batch: int, chunk: int, num_blocks: int, max_ahead: int
) -> None:
    engine = warm_engine(
        max_batch=max_batch, prefill_chunk=chunk, kv_cache_bytes=num_blocks * BLOCK_BYTES, max_ahead=max_ahead
    )
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    cancelled: set[str] = set()
    turn = 0
    while turn < 46 or engine.has_work:
        for arrives, one, leaves in company:
            if arrives == turn:
                engine.add(one)
            if leaves == turn:
                cancelled |= {event.request_id for event in engine.cancel(one.request_id)}
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            answers[event.request_id, event.index] += event.token_ids
        turn += 1
        assert turn < 5000
    for _, one, _ in company:
        for key, deltas in cold(one).items():
            expected = tokens(deltas)
            assert answers[key] == (expected[: len(answers[key])] if one.request_id in cancelled else expected)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def spelling(sequence: Sequence) -> int:
    return 1 + (sum(sequence.token_ids) + len(sequence.token_ids)) % 250


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_request_that_comes_out_as_nan_leaves_nothing_to_find_and_spares_who_shares_its_blocks(
    max_ahead: int,
) -> None:
    engine, runner = script_engine(spelling, max_ahead=max_ahead, prefix_cache=True)
    prompt = tuple(range(1, 19))
    for name in ("good", "bad"):
        engine.add(request(name, prompt, max_tokens=20, logprobs=None))
    for _ in range(8):
        engine.step()
    good, bad = engine.scheduler.running
    assert good.block_table[:4] == bad.block_table[:4]
    engine.kv_cache.storage.fill_(7.0)
    own = [block for block in bad.block_table if block not in good.block_table]
    runner.bad_rows.add("bad")
    events = [event for _ in range(3) for event in engine.step()]
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert [(event.request_id, type(event.error)) for event in failed] == [("bad", NumericalError)]
    assert (engine.kv_cache.storage[:, :, own] == 0).all()
    assert (engine.kv_cache.storage[:, :, good.block_table] == 7).all()
    answers = run(engine, request("late", prompt, logprobs=None))
    assert answers["late", 0][0].cached_tokens == 0
    assert answers["good", 0][-1].finish_reason is not None


def test_a_step_that_fails_to_launch_leaves_nothing_to_find() -> None:
    engine, runner = script_engine(spelling, prefix_cache=True)
    runner.error = RuntimeError("launch failed")
    engine.add(request("r", tuple(range(1, 19)), logprobs=None))
    with pytest.raises(RuntimeError):
        engine.step()
    engine.cancel("r")
    runner.error = None
    assert run(engine, request("r", tuple(range(1, 19)), logprobs=None))["r", 0][0].cached_tokens == 0


ENGINES = {
    "eager": warm_engine(),
    "ahead": warm_engine(max_ahead=1),
    "graphs": warm_engine(graphs="fake", capture="startup"),
}
