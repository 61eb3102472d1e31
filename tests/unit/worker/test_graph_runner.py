"""The whole graph path without a GPU: keys, buffers, padding, dispatch, self-check, over the fake capture backend."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.build import prepare
from worker.engine import Engine
from worker.graph_runner import GraphRunner, worker_keys
from worker.graphs.key import GraphKey
from worker.graphs.plan import MAX_KEYS
from worker.load import GraphReadiness
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams
from worker.tiers import BucketTable, TierTable, default_buckets

MODEL = tiny_model()


def graph_engine(**changes: Any) -> tuple[Engine, GraphRunner]:
    engine = tiny_engine(
        MODEL, graphs="fake", **({"max_batch": 4, "prefill_chunk": 16, "capture": "startup"} | changes)
    )
    assert isinstance(engine.runner, GraphRunner)
    return engine, engine.runner


def request(name: str, length: int, **params: Any) -> GenerateRequest:
    prompt = tuple((7 * i + length) % VOCAB for i in range(length))
    values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values))


def answers(engine: Engine, requests: list[GenerateRequest]) -> dict[tuple[str, int], list[int]]:
    for one in requests:
        engine.add(one)
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
    return found


MIXED = [
    request("greedy", 5),
    request("edge", 15),
    request("chunked", 45, max_tokens=20),
    request("random", 9, temperature=1.0, seed=3, top_p=0.9),
    request("choices", 12, temperature=0.8, n=3, seed=4),
    request("penalised", 7, repetition_penalty=1.4, logprobs=2),
    request("one", 1),
]


def test_every_planned_key_is_captured_and_agrees_with_eager() -> None:
    engine, runner = graph_engine()
    while engine.prepare_next():
        pass
    planned = worker_keys(runner.eager.tiers, BucketTable(default_buckets(4)), BucketTable(default_buckets(16)))
    assert runner.dispatcher.captured == set(planned)
    assert not runner.dispatcher.quarantined
    assert runner.readiness is GraphReadiness.FULL


def test_mixed_requests_get_the_same_tokens_from_graphs_as_eagerly() -> None:
    engine, runner = graph_engine()
    while engine.prepare_next():
        pass
    assert answers(engine, MIXED) == answers(tiny_engine(MODEL, max_batch=4), MIXED)
    assert not runner.dispatcher.misses
    load = engine.load()
    assert (load.graph_replays, load.eager_steps) == (load.steps, 0)
    assert load.readiness is GraphReadiness.FULL


def test_capturing_between_steps_changes_no_token() -> None:
    engine, runner = graph_engine(capture="background")
    for one in MIXED:
        engine.add(one)
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    readiness = {runner.readiness}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
        for event in engine.flush():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
        engine.prepare_next()
        engine.prepare_next()
        readiness.add(runner.readiness)
    assert found == answers(tiny_engine(MODEL, max_batch=4), MIXED)
    assert readiness >= {GraphReadiness.EAGER, GraphReadiness.PARTIAL}
    assert 0 < engine.load().graph_replays < engine.load().steps


def test_steps_over_the_same_rows_need_no_upload() -> None:
    engine, runner = graph_engine()
    runner.prepare_all()
    uploads = runner.eager.decode_inputs.num_uploads
    for one in (request("a", 5, max_tokens=24), request("b", 6, max_tokens=24)):
        engine.add(one)
    while engine.has_work:
        engine.step()
    steps = sum(count for key, count in runner.dispatcher.replays.items() if key.phase == "decode")
    # A new block every four tokens of each row, and the changes of company at both ends.
    assert steps >= 23
    assert runner.eager.decode_inputs.num_uploads - uploads <= steps // 2 + 2


def test_without_a_shared_pool_the_tokens_are_the_same() -> None:
    engine, runner = graph_engine(use_graph_pool=False)
    runner.prepare_all()
    assert answers(engine, MIXED[:3]) == answers(tiny_engine(MODEL, max_batch=4), MIXED[:3])


def test_a_cap_on_graph_memory_drops_the_largest_and_the_rest_serves() -> None:
    engine, runner = graph_engine(max_graph_bytes=120_000)
    runner.prepare_all()
    assert runner.dispatcher.dropped
    assert runner.dispatcher.captured
    assert runner.readiness is GraphReadiness.PARTIAL
    assert answers(engine, MIXED) == answers(tiny_engine(MODEL, max_batch=4), MIXED)
    assert sum(runner.dispatcher.misses.values()) == engine.load().eager_steps > 0


def test_a_graph_that_disagrees_with_eager_is_quarantined_by_name_and_the_tokens_stay_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = graph_engine()
    bad = GraphKey("decode", 16, 2)
    backend = runner.session.recorder.pool.backend
    real = backend.capture

    def capture(run: Any, **options: Any) -> Any:
        recorded = real(run, **options)
        if capturing == [bad]:
            replay = recorded.replay

            @torch.inference_mode()
            def spoilt() -> None:
                replay()
                recorded.outputs[0].add_(torch.arange(VOCAB))

            recorded.replay = spoilt  # type: ignore[method-assign]
        return recorded

    capturing: list[GraphKey] = []
    record = runner.session.recorder.capture

    def note(key: GraphKey, *args: Any, **options: Any) -> Any:
        capturing[:] = [key]
        return record(key, *args, **options)

    monkeypatch.setattr(backend, "capture", capture)
    monkeypatch.setattr(runner.session.recorder, "capture", note)
    runner.prepare_all()
    assert set(runner.dispatcher.quarantined) == {bad}
    pair = [request("a", 3), request("b", 4)]
    assert answers(engine, pair) == answers(tiny_engine(MODEL, max_batch=4), pair)
    assert engine.load().eager_steps > 0


def test_nan_in_free_blocks_and_padding_rows_reaches_no_live_row() -> None:
    engine, runner = graph_engine()
    runner.prepare_all()
    expected = answers(tiny_engine(MODEL, max_batch=4), MIXED)
    engine.kv_cache.storage.fill_(torch.nan)
    assert answers(engine, MIXED) == expected


def test_a_warm_up_over_the_inputs_of_a_running_step_leaves_its_blocks_alone() -> None:
    engine, _ = graph_engine(capture="background")
    engine.add(request("r", 30, max_tokens=40))
    for _ in range(6):
        engine.step()
    engine.flush()
    live = engine.scheduler.running[0].block_table
    before = engine.kv_cache.storage[:, :, live].clone()
    while engine.prepare_next():
        pass
    assert torch.equal(engine.kv_cache.storage[:, :, live], before)


@pytest.mark.parametrize("edge", [16, 32, 64, 128])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_tier_edges_replay_equal_to_eager(edge: int, offset: int) -> None:
    engine, runner = SHARED
    length = min(edge + offset, 128) - 4
    batch = [request(str(i), max(length - i, 1), max_tokens=4) for i in range(3)]
    assert answers(engine, batch) == answers(tiny_engine(MODEL, max_batch=4), batch)
    assert not runner.dispatcher.misses


def test_prompts_that_wait_together_are_computed_in_one_graph() -> None:
    engine, runner = SHARED
    batch = [request(str(i), 3 + i, max_tokens=3) for i in range(3)]
    before = dict(runner.dispatcher.replays)
    assert answers(engine, batch) == answers(tiny_engine(MODEL, max_batch=4), batch)
    used = {key: count - before.get(key, 0) for key, count in runner.dispatcher.replays.items()}
    assert [count for key, count in used.items() if key.phase == "prefill" and count] == [1]
    assert sum(count for key, count in used.items() if key.variant == "packed") == 1


def test_the_keys_are_every_tier_and_bucket_and_the_prefill_shapes() -> None:
    tiers = TierTable((256, 1024, 4096, 131072), 16)
    keys = worker_keys(tiers, BucketTable(default_buckets(256)), BucketTable(default_buckets(1024)))
    assert sum(key.phase == "decode" for key in keys) == 4 * 9
    assert {key.bucket for key in keys if key.variant == "fresh"} == {16, 32, 64, 128, 256, 512, 1024}
    assert {key.bucket for key in keys if key.variant == "packed"} == {64, 128, 256, 512, 1024}
    later = {tier: {key.bucket for key in keys if (key.variant, key.tier) == ("chunk", tier)} for tier in tiers.lengths}
    assert later[256] == {16, 32, 64, 128, 256}
    assert later[1024] == later[4096] == later[131072] == {16, 32, 64, 128, 256, 512, 1024}
    assert len(keys) <= MAX_KEYS


SHARED = graph_engine()
SHARED[1].prepare_all()


def test_capturing_at_startup_says_how_far_it_is() -> None:
    engine, runner = graph_engine()
    seen: list[tuple[str, int, int]] = []
    prepare(engine, lambda what, done, total: seen.append((what, done, total)))
    assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] == seen[-1][2] == 2 * len(runner.dispatcher.captured)
    assert all("MiB" in what for what, _, _ in seen)
