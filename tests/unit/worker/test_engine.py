from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.fakes.script_runner import EOS, ManualClock, NextToken, ScriptRunner
from tests.fakes.script_runner import script_engine as build
from worker.batch import Batch
from worker.engine import Engine
from worker.errors import DeadlineExceeded, InvalidRequest, NumericalError, QueueFull, RequestAborted
from worker.request import ChoiceDelta, EngineEvent, FinishReason, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams
from worker.sequence import Sequence


def spell(text: str) -> dict[int, int]:
    """Tokens by place in the answer: the bytes of `text`, then end of sequence."""
    return dict(enumerate([*text.encode(), EOS]))


AHEAD = 0


@pytest.fixture(params=[0, 1], ids=["in step", "one ahead"], autouse=True)
def _ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with steps read at once, and with one step launched ahead of what is read."""
    monkeypatch.setattr(sys.modules[__name__], "AHEAD", request.param)


def script_engine(next_token: NextToken, **options: Any) -> tuple[Engine, ScriptRunner]:
    return build(next_token, max_ahead=AHEAD, **options)


def speaker(text: str) -> NextToken:
    script = spell(text)
    return lambda sequence: script.get(sequence.num_generated, EOS)


def request(name: str = "r", prompt: str = "hi", **params: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt.encode()),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def run(engine: Engine, limit: int = 1000) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(limit):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def deltas(events: list[EngineEvent], name: str = "r", index: int = 0) -> list[ChoiceDelta]:
    return [e for e in events if isinstance(e, ChoiceDelta) and (e.request_id, e.index) == (name, index)]


def text_of(events: list[EngineEvent], name: str = "r", index: int = 0) -> str:
    return "".join(delta.text for delta in deltas(events, name, index))


def assert_all_free(engine: Engine) -> None:
    assert not engine.live_request_ids
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def test_an_answer_ends_at_the_end_of_sequence_token_which_has_no_text() -> None:
    engine, _ = script_engine(speaker("hello"))
    engine.add(request())
    events = run(engine)
    assert text_of(events) == "hello"
    last = deltas(events)[-1]
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == (FinishReason.STOP, EOS, (EOS,))
    assert last.prompt_tokens == 2
    assert_all_free(engine)


def test_max_tokens_ends_an_answer_with_length() -> None:
    engine, _ = script_engine(speaker("hello"))
    engine.add(request(max_tokens=3))
    events = run(engine)
    assert text_of(events) == "hel"
    assert deltas(events)[-1].finish_reason is FinishReason.LENGTH


def test_without_max_tokens_an_answer_may_fill_the_context_exactly() -> None:
    engine, _ = script_engine(lambda _: ord("x"), max_model_len=64)
    engine.add(request(prompt="p" * 10))
    events = run(engine)
    assert len(text_of(events)) == 54
    assert deltas(events)[-1].finish_reason is FinishReason.LENGTH
    assert_all_free(engine)


@pytest.mark.parametrize("prompt", [7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63])
@pytest.mark.parametrize("extra", [0, 1])
def test_lengths_around_every_tier_edge_end_with_all_their_tokens(prompt: int, extra: int) -> None:
    engine, runner = script_engine(lambda _: ord("x"), max_model_len=64)
    max_tokens = min(2 + extra, 64 - prompt)
    engine.add(request(prompt="p" * prompt, max_tokens=max_tokens))
    assert len(text_of(run(engine))) == max_tokens
    assert all(segment.end <= batch.tier for batch in runner.batches for segment in batch.segments)


@pytest.mark.parametrize("stop", ["lo", "o w", "hello world", "h", "d"])
def test_a_stop_string_ends_the_answer_before_it(stop: str) -> None:
    engine, _ = script_engine(speaker("hello world"))
    engine.add(request(stop=(stop,)))
    events = run(engine)
    assert text_of(events) == "hello world"[: "hello world".index(stop)]
    assert deltas(events)[-1].stop_string == stop
    assert_all_free(engine)


def test_text_that_could_begin_a_stop_string_is_held_back_and_then_released() -> None:
    engine, _ = script_engine(speaker("abcabd"))
    engine.add(request(stop=("abd!",)))
    events = run(engine)
    assert text_of(events) == "abcabd"
    assert deltas(events)[0].text == ""


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    engine, _ = script_engine(speaker(""))
    engine.add(request(ignore_eos=True, max_tokens=4))
    assert [d.token_ids for d in deltas(run(engine))] == [(EOS,)] * 4


def test_a_stop_token_of_the_request_ends_it() -> None:
    engine, _ = script_engine(speaker("hello"))
    engine.add(request(stop_token_ids=(ord("l"),)))
    events = run(engine)
    assert text_of(events) == "he"
    assert deltas(events)[-1].stop_token_id == ord("l")


def test_every_choice_ends_with_its_own_reason() -> None:
    def by_choice(sequence: Sequence) -> int:
        return spell("ab" * (sequence.index + 1)).get(sequence.num_generated, EOS)

    engine, _ = script_engine(by_choice)
    engine.add(request(n=3))
    events = run(engine)
    assert [text_of(events, index=i) for i in range(3)] == ["ab", "abab", "ababab"]
    finished = [e.index for e in events if isinstance(e, ChoiceDelta) and e.finish_reason]
    assert sorted(finished) == [0, 1, 2]
    assert_all_free(engine)


def test_half_a_character_is_never_emitted() -> None:
    engine, _ = script_engine(speaker("naïve 😀 ok"))
    engine.add(request())
    events = run(engine)
    assert text_of(events) == "naïve 😀 ok"
    assert not any("�" in delta.text for delta in deltas(events))


def test_a_cancelled_request_frees_its_row_and_blocks_at_once() -> None:
    engine, _ = script_engine(lambda _: ord("x"))
    engine.add(request("a"))
    engine.add(request("b", max_tokens=5))
    engine.step()
    (event,) = engine.cancel("a")
    assert isinstance(event, RequestFailed)
    assert isinstance(event.error, RequestAborted)
    assert text_of(run(engine), "b")
    assert_all_free(engine)


def test_cancelling_an_unknown_request_changes_nothing() -> None:
    engine, _ = script_engine(speaker("x"))
    assert engine.cancel("nobody") == []


def test_a_request_past_its_deadline_ends_and_a_waiting_one_never_starts() -> None:
    clock = ManualClock()
    engine, runner = script_engine(lambda _: ord("x"), max_batch=1, clock=clock)
    for name, deadline_s in (("runs", 105.0), ("waits", 101.0)):
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=(1,), deadline_s=deadline_s))
    engine.step()
    clock.now_s = 102.0
    events = engine.step()
    failed = [e for e in events if isinstance(e, RequestFailed)]
    assert [(e.request_id, type(e.error)) for e in failed] == [("waits", DeadlineExceeded)]
    clock.now_s = 105.0
    assert any(isinstance(e, RequestFailed) and e.request_id == "runs" for e in engine.step())
    assert not any(s.sequence.request.request_id == "waits" for b in runner.batches for s in b.segments)
    assert_all_free(engine)


def test_a_row_of_nan_fails_its_own_request_and_no_other() -> None:
    engine, runner = script_engine(speaker("hello"))
    runner.bad_rows.add("bad")
    for name in ("good", "bad", "fine"):
        engine.add(request(name, n=2))
    engine.kv_cache.storage.fill_(torch.nan)
    events = run(engine)
    failed = [e for e in events if isinstance(e, RequestFailed)]
    assert [(e.request_id, type(e.error)) for e in failed] == [("bad", NumericalError)]
    assert text_of(events, "good") == text_of(events, "fine") == "hello"
    assert_all_free(engine)


def test_blocks_of_a_failed_row_are_zeroed_before_anyone_else_gets_them() -> None:
    engine, runner = script_engine(speaker("hello"))
    runner.bad_rows.add("bad")
    engine.add(request("bad"))
    engine.kv_cache.storage.fill_(torch.nan)
    run(engine)
    zeroed = (engine.kv_cache.storage == 0).all(dim=-1).all(dim=-1).all(dim=-1).all(dim=0).all(dim=0)
    assert int(zeroed.sum()) == 1


def test_a_duplicate_request_id_is_refused_while_the_first_lives() -> None:
    engine, _ = script_engine(speaker("x"))
    engine.add(request("a"))
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add(request("a"))
    run(engine)
    engine.add(request("a"))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (GenerateRequest(request_id="r", prompt_token_ids=()), "prompt"),
        (GenerateRequest(request_id="r", prompt_token_ids=(1,) * 64), "prompt"),
        (GenerateRequest(request_id="r", prompt_token_ids=(256,)), "prompt"),
        (GenerateRequest(request_id="r", prompt_token_ids=(-1,)), "prompt"),
        (request(prompt="p" * 60, max_tokens=5), "max_tokens"),
        (request(prompt="p" * 60, min_tokens=5), "min_tokens"),
        (request(stop_token_ids=(256,)), "stop_token_ids"),
        (request(logit_bias={256: 1.0}), "logit_bias"),
        (request(allowed_token_ids=(999,)), "allowed_token_ids"),
        (request(allowed_token_ids=(7, 8), stop_token_ids=(7, 8, 9), min_tokens=1), "min_tokens"),
        (request(allowed_token_ids=(EOS,), min_tokens=1), "min_tokens"),
        (request(stop_token_ids=tuple(range(256)), min_tokens=1), "min_tokens"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_name(bad: GenerateRequest, field: str) -> None:
    engine, _ = script_engine(speaker("x"))
    with pytest.raises(InvalidRequest) as caught:
        engine.add(bad)
    assert caught.value.field == field
    assert_all_free(engine)


def test_a_full_queue_keeps_nothing_of_the_refused_request() -> None:
    engine, _ = script_engine(speaker("x"), max_waiting=2)
    engine.add(request("a", n=2))
    with pytest.raises(QueueFull):
        engine.add(request("b"))
    assert set(engine.live_request_ids) == {"a"}


def test_answers_are_the_same_alone_and_under_memory_pressure() -> None:
    def echo(sequence: Sequence) -> int:
        return 1 + (sum(sequence.token_ids) * 31 + len(sequence.token_ids)) % 255

    expected = {}
    for i in range(12):
        engine, _ = script_engine(echo)
        engine.add(request(f"r{i}", prompt="p" * (i + 1), max_tokens=40, ignore_eos=True))
        expected[f"r{i}"] = [d.token_ids for d in deltas(run(engine), f"r{i}")]
    engine, _ = script_engine(echo, num_blocks=18)
    for i in range(12):
        engine.add(request(f"r{i}", prompt="p" * (i + 1), max_tokens=40, ignore_eos=True))
    got = defaultdict(list)
    for event in run(engine, 5000):
        assert isinstance(event, ChoiceDelta)
        got[event.request_id].append(event.token_ids)
    assert got == expected
    assert engine.scheduler.num_preemptions > 0
    assert_all_free(engine)


def test_the_load_counts_rows_queue_tokens_and_age() -> None:
    clock = ManualClock()
    engine, _ = script_engine(lambda _: ord("x"), max_batch=2, clock=clock)
    for i in range(3):
        engine.add(request(str(i), prompt="pppp", max_tokens=10))
    clock.now_s += 3
    engine.step()
    engine.flush()
    load = engine.load()
    assert (load.running, load.waiting, load.queue_age_s) == (2, 1, 3.0)
    assert load.outstanding_tokens == 2 * 9 + 14
    assert load.steps == 1
    assert load.total_blocks - load.free_blocks == 4


def test_a_row_that_ends_while_a_step_is_under_way_wastes_one_row_and_nothing_else() -> None:
    engine, runner = script_engine(speaker("hello"))
    engine.add(request())
    assert text_of(run(engine)) == "hello"
    assert engine.num_wasted_rows == AHEAD
    assert len(runner.batches) == 6 + AHEAD
    assert_all_free(engine)


def test_no_step_is_launched_past_max_tokens() -> None:
    engine, runner = script_engine(lambda _: ord("x"))
    engine.add(request(max_tokens=5))
    run(engine)
    assert len(runner.batches) == 5
    assert engine.num_wasted_rows == 0


def test_cancelling_with_a_step_under_way_frees_everything_and_spares_the_rest() -> None:
    engine, _ = script_engine(speaker("hello"))
    engine.add(request("a"))
    engine.add(request("b"))
    events = engine.step() + engine.step()
    events += engine.cancel("a")
    events += run(engine)
    assert text_of(events, "b") == "hello"
    assert_all_free(engine)


def test_the_time_of_a_step_includes_its_launch() -> None:
    clock = ManualClock()
    engine, runner = build(lambda _: ord("x"), clock=clock, max_ahead=0)
    launch = runner.launch

    def slow(batch: Batch) -> Any:
        clock.now_s += 0.5
        return launch(batch)

    runner.launch = slow  # type: ignore[method-assign]
    engine.add(request(max_tokens=5))
    run(engine)
    assert engine.load().step_ms == pytest.approx(500)


def test_tokens_are_held_back_to_be_handed_out_together_but_never_the_first_nor_the_end() -> None:
    clock = ManualClock()
    engine, _ = script_engine(speaker("abcdefgh"), clock=clock, hold_s=lambda num_live: 0.01 * num_live)
    engine.add(request())
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
        clock.now_s += 0.004
    assert [len(delta.token_ids) for delta in deltas(events)] == [1, 3, 3, 2]
    assert "".join(delta.text for delta in deltas(events)) == "abcdefgh"
    assert deltas(events)[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stop", [(), ("gh",)])
def test_held_tokens_come_with_their_text_and_logprobs_and_stop_where_they_would_have(stop: tuple[str, ...]) -> None:
    texts = []
    for hold_s in (0.0, 1.0):
        engine, _ = script_engine(speaker("abcdefgh ijkl"), hold_s=lambda num_live, hold_s=hold_s: hold_s)
        engine.add(request(stop=stop))
        events = deltas(run(engine))
        texts.append(
            ("".join(e.text for e in events), [i for e in events for i in e.token_ids], events[-1].stop_string)
        )
    assert texts[0] == texts[1]


def test_a_request_that_fails_hands_out_what_was_held_first() -> None:
    engine, runner = script_engine(speaker("abcdefgh"), hold_s=lambda num_live: 9.0)
    engine.add(request())
    for _ in range(4 + AHEAD):
        engine.step()
    runner.bad_rows.add("r")
    events = run(engine)
    assert isinstance(events[-1], RequestFailed)
    assert [delta.text for delta in deltas(events)] == ["bcd"]
