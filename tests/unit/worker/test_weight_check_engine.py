"""A whole engine that looks at its weights between steps: no false alarm whatever it serves, and an end when it is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.one_thread import one_thread  # noqa: F401
from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.bit_flips import BitFlips
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.errors import EngineDead, WeightsCorrupted
from worker.faults import Faults
from worker.request import ChoiceDelta, EngineEvent, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams

PROMPT = (5, 6, 7, 8, 9)
ALWAYS = 1e-9
"""An interval: pass after pass."""


def request(name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values))


def all_kinds() -> list[GenerateRequest]:
    return [
        request("greedy"),
        request("again"),
        request("long", tuple(range(4, 60))),
        request("sampled", temperature=1.0, seed=3, top_p=0.9, logprobs=2),
        request("choices", temperature=0.8, n=3, seed=4, repetition_penalty=1.3),
    ]


def run(engine: Engine, *, look: bool) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for one in all_kinds():
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        if look:
            look_once(engine)
    return found


def look_once(engine: Engine) -> None:
    """One pass, even under load: the pace is tested elsewhere."""
    check = engine._weight_check
    assert check is not None
    passes = check.snapshot().passes
    while check.snapshot().passes == passes:
        check.advance(has_work=False)


@pytest.mark.parametrize(
    "options",
    [{"graphs": "off"}, {"graphs": "fake", "max_batch": 2}, {"graphs": "off", "deterministic": True}],
    ids=["eager", "graphs", "deterministic"],
)
def test_whatever_is_served_weights_stay_as_they_are_and_looking_changes_no_token(options: dict[str, Any]) -> None:
    looking = tiny_engine(tiny_model(), weight_check_interval_s=ALWAYS, **options)
    plain = tiny_engine(tiny_model(), weight_check_interval_s=0, **options)
    assert run(looking, look=True) == run(plain, look=False)
    for engine in (looking, plain):
        while engine.prepare_next():
            pass
    assert run(looking, look=True) == run(plain, look=False)
    assert looking.load().weights.passes > 50
    assert plain.load().weights.passes == plain.load().weights.watched_bytes == 0


def test_buffers_of_a_transformers_model_are_watched_and_stay_as_they_are(tmp_path: Path) -> None:
    sink = Sink()
    write_checkpoint(tmp_path, "llama")
    config = WorkerConfig(
        model=str(tmp_path),
        device="cpu",
        model_impl="transformers",
        graphs="off",
        kv_cache_bytes=1 << 22,
        weight_check_interval_s=ALWAYS,
    )
    built = build_engine(config, sink)
    try:
        built.engine.submit(request("a"))
        sink.wait_for(lambda: any(isinstance(event, ChoiceDelta) and event.finish_reason for event in sink.events))
        passes = built.engine.load().weights.passes
        wait_until(lambda: built.engine.load().weights.passes > passes + 5)
    finally:
        built.engine.stop()


class Sink:
    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for(self, condition: Any, timeout_s: float = 20) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s)


def wait_until(condition: Any, timeout_s: float = 20) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


class Living:
    """An engine on its thread, with bits to flip."""

    def __init__(self, **options: Any) -> None:
        model = tiny_model()
        self.sink, self.deaths, self.faults = Sink(), list[BaseException](), Faults()
        engine = tiny_engine(model, **options)
        self.thread = EngineThread(engine, self.sink, on_death=self.deaths.append)
        self.faults.on_flip = BitFlips(model.model.module, self.thread.between_steps)


@pytest.fixture
def living() -> Iterator[Living]:
    one = Living(weight_check_interval_s=0.05, graphs="off")
    yield one
    one.thread.stop()


def test_an_idle_engine_ends_when_a_bit_has_flipped_and_says_why(living: Living) -> None:
    living.thread.submit(request("first"))
    wait_until(lambda: living.thread.load().weights.passes > 1)
    wait_until(lambda: living.thread.load().weights.age_s < 1)
    living.faults.flip_weight("layers.1.down_weight", 77)
    wait_until(lambda: living.deaths)
    assert isinstance(living.deaths[0], WeightsCorrupted)
    with pytest.raises(WeightsCorrupted, match=r"layers\.1\.down_weight"):
        living.thread.check()
    with pytest.raises(EngineDead):
        living.thread.submit(request("late"))


def test_an_engine_that_is_never_idle_finds_it_too_and_ends_its_requests_with_it(living: Living) -> None:
    def keep_busy() -> None:
        for number in range(10_000):
            if living.deaths:
                return
            try:
                living.thread.submit(request(str(number), max_tokens=100))
            except EngineDead:
                return
            wait_until(lambda: living.deaths or living.thread.load().running + living.thread.load().waiting < 6)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    wait_until(lambda: living.thread.load().weights.passes >= 1, 60)
    living.faults.flip_weight("rope_table", 8 * 4 * 8 * 127)
    wait_until(lambda: living.deaths, 60)
    busy.join(10)
    errors = [event.error for event in living.sink.events if isinstance(event, RequestFailed)]
    assert errors
    assert {type(error) for error in errors} == {WeightsCorrupted}
    assert living.thread.load().steps > 100


def test_without_a_check_nobody_notices() -> None:
    living = Living(weight_check_interval_s=0, graphs="off")
    try:
        living.faults.flip_weight("layers.1.down_weight", 77)
        living.thread.submit(request("a"))
        living.sink.wait_for(lambda: any(isinstance(e, ChoiceDelta) and e.finish_reason for e in living.sink.events))
        time.sleep(0.3)
        assert not living.deaths
    finally:
        living.thread.stop()


def test_a_bit_cannot_flip_where_there_are_no_weights() -> None:
    with pytest.raises(ValueError, match="no weights"):
        Faults().flip_weight("embedding", 0)


def test_work_between_steps_that_fails_ends_the_engine(living: Living) -> None:
    living.thread.between_steps(lambda: 1 // 0)  # type: ignore[arg-type]
    wait_until(lambda: living.deaths)
    assert isinstance(living.deaths[0], ZeroDivisionError)
