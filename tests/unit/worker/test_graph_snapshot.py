"""What a runner tells about its graphs, and how it reaches the host of the engine."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from tests.fakes.script_runner import script_engine
from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.graph_runner import GraphRunner
from worker.load import GraphSnapshot
from worker.request import ChoiceDelta, EngineEvent, GenerateRequest
from worker.sampling import SamplingParams

MODEL = tiny_model()


def graph_engine(**changes: Any) -> tuple[Engine, GraphRunner]:
    engine = tiny_engine(MODEL, graphs="fake", **({"max_batch": 4, "prefill_chunk": 16} | changes))
    assert isinstance(engine.runner, GraphRunner)
    return engine, engine.runner


def run(engine: Engine, length: int, max_tokens: int, name: str = "r") -> None:
    prompt = tuple((7 * i + length) % VOCAB for i in range(length))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=params))
    while engine.has_work:
        engine.step()


def test_replays_are_counted_by_key_and_padding_by_row() -> None:
    engine, runner = graph_engine()
    runner.prepare_all()
    run(engine, length=5, max_tokens=4)
    snapshot = engine.graph_snapshot()
    used = {(use.phase, use.bucket, use.variant): use.replays for use in snapshot.uses if use.replays}
    assert used == {("prefill", 16, "fresh"): 1, ("decode", 1, "default"): 3}
    assert snapshot.padding_rows == 16 - 5
    assert len(snapshot.uses) == len(runner.session.graphs)
    assert snapshot.misses == ()
    assert sum(use.replays for use in snapshot.uses) == engine.load().graph_replays
    assert snapshot.capture_s > 0


def test_steps_before_the_first_capture_are_misses_with_their_reason() -> None:
    engine, _ = graph_engine()
    run(engine, length=5, max_tokens=4)
    snapshot = engine.graph_snapshot()
    assert snapshot.misses == (("pending", 4),)
    assert sum(use.replays for use in snapshot.uses) == 0


def test_graphs_that_were_given_up_are_counted() -> None:
    engine, runner = graph_engine(max_graph_bytes=120_000)
    runner.prepare_all()
    snapshot = engine.graph_snapshot()
    assert snapshot.dropped == len(runner.dispatcher.dropped) > 0
    assert 0 < snapshot.pool_bytes <= 120_000


def test_without_graphs_there_is_nothing_to_tell() -> None:
    engine = tiny_engine(MODEL)
    run(engine, length=5, max_tokens=4)
    assert engine.graph_snapshot() == GraphSnapshot()


def test_preemptions_and_wasted_rows_are_in_the_load() -> None:
    engine, _ = script_engine(lambda sequence: 65, max_batch=8, num_blocks=17, max_ahead=1)
    for name in "abcd":
        params = SamplingParams(max_tokens=40, stop_token_ids=(65,), min_tokens=30)
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=params))
    while engine.has_work:
        engine.step()
    load = engine.load()
    assert load.preemptions == engine.scheduler.num_preemptions > 0
    assert load.wasted_rows == engine.num_wasted_rows > 0


def test_the_thread_takes_a_snapshot_at_most_every_50_ms_and_has_the_last_word_soon_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = graph_engine()
    runner.prepare_all()
    taken: list[float] = []
    real = runner.graph_snapshot

    def snapshot() -> GraphSnapshot:
        taken.append(time.monotonic())
        return real()

    monkeypatch.setattr(runner, "graph_snapshot", snapshot)
    done = threading.Event()

    def sink(events: Any) -> None:
        last: EngineEvent = events[-1]
        if isinstance(last, ChoiceDelta) and last.finish_reason is not None:
            done.set()

    thread = EngineThread(engine, sink)
    try:
        for number in range(20):
            done.clear()
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            thread.submit(GenerateRequest(request_id=str(number), prompt_token_ids=(1, 2, 3), sampling=params))
            assert done.wait(30)
        deadline_s = time.monotonic() + 20
        while sum(use.replays for use in thread.load().graphs.uses) < 20 * 4:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        thread.stop()
    gaps = [after - before for before, after in itertools.pairwise(taken[1:])]
    assert all(gap >= 0.049 for gap in gaps), gaps
