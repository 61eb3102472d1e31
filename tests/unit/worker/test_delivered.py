"""Answers that began elsewhere, and suspects that run alone."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.script_runner import EOS, NextToken, ScriptRunner
from tests.fakes.script_runner import script_engine as build
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.errors import InvalidRequest
from worker.request import ChoiceDelta, EngineEvent, FinishReason, GenerateRequest, Phase, RequestPhase
from worker.sampling import SamplingParams
from worker.sequence import Sequence

AHEAD = 0


@pytest.fixture(params=[0, 1], ids=["in step", "one ahead"], autouse=True)
def _ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "AHEAD", request.param)


def script_engine(next_token: NextToken, **options: Any) -> tuple[Engine, ScriptRunner]:
    return build(next_token, max_ahead=AHEAD, **options)


def speaker(*texts: str) -> NextToken:
    """Choice i says the i-th text, wherever it was begun."""
    scripts = [[*text.encode(), EOS] for text in texts]

    def speak(sequence: Sequence) -> int:
        script = scripts[sequence.index % len(scripts)]
        return script[sequence.num_generated] if sequence.num_generated < len(script) else EOS

    return speak


def request(name: str = "r", prompt: str = "hi", **values: Any) -> GenerateRequest:
    own = {
        key: values.pop(key)
        for key in ("delivered", "finished", "is_trial", "trial_tokens", "is_moved")
        if key in values
    }
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt.encode()), sampling=SamplingParams(**values), **own
    )


def run(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(1000):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def answer(engine: Engine, work: GenerateRequest) -> dict[int, list[ChoiceDelta]]:
    """What the engine brings, by choice."""
    deltas: dict[int, list[ChoiceDelta]] = {}
    for event in [*engine.add(work), *run(engine)]:
        assert isinstance(event, ChoiceDelta)
        deltas.setdefault(event.index, []).append(event)
    assert not engine.live_request_ids
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    return deltas


def of(deltas: list[ChoiceDelta]) -> tuple[tuple[int, ...], list[str], ChoiceDelta]:
    return tuple(token for delta in deltas for token in delta.token_ids), [delta.text for delta in deltas], deltas[-1]


CASES: dict[str, dict[str, Any]] = {
    "eos": {},
    "length": {"max_tokens": 7},
    "stop string": {"stop": ("wörld!", "old")},
    "stop string that is shown": {"stop": ("ö",), "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": (ord("w"),), "min_tokens": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_answer_taken_up_after_any_token_brings_what_is_missing_piece_by_piece(
    case: str, prefix_cache: bool
) -> None:
    says = speaker("hello wörld, old friend", "hellö")
    params = {"n": 2, **CASES[case]}
    whole = answer(script_engine(says)[0], request(**params))
    longest = max(len(of(deltas)[0]) for deltas in whole.values())
    engine, _ = script_engine(says, prefix_cache=prefix_cache)
    for cut in range(1, longest):
        ids = [of(whole[index])[0][:cut] for index in range(2)]
        finished = frozenset(index for index in range(2) if len(of(whole[index])[0]) <= cut)
        rest = answer(engine, request(delivered=tuple(ids), finished=finished, **params))
        for index in {0, 1} - finished:
            tokens, texts, last = of(rest[index])
            assert tokens == of(whole[index])[0][cut:]
            assert texts == of(whole[index])[1][cut:]
            expected = of(whole[index])[2]
            assert (last.finish_reason, last.stop_string, last.stop_token_id) == (
                expected.finish_reason,
                expected.stop_string,
                expected.stop_token_id,
            )
        assert not rest.keys() & finished


@pytest.mark.parametrize("case", CASES)
def test_a_choice_that_its_delivered_tokens_end_ends_with_its_reason_and_no_token(case: str) -> None:
    says = speaker("hello wörld, old friend")
    tokens, _, expected = of(answer(script_engine(says)[0], request(**CASES[case]))[0])
    engine, runner = script_engine(says)
    ((last,),) = answer(engine, request(delivered=(tokens,), **CASES[case])).values()
    assert (last.token_ids, last.text, last.prompt_tokens) == ((), "", 2)
    assert (last.finish_reason, last.stop_string, last.stop_token_id) == (
        expected.finish_reason,
        expected.stop_string,
        expected.stop_token_id,
    )
    assert not runner.batches


def test_the_other_choices_of_one_that_ended_go_on() -> None:
    engine, _ = script_engine(speaker("ab"))
    rest = answer(engine, request(n=3, delivered=((*b"ab", EOS), (*b"a",), ()), max_tokens=9))
    assert [of(rest[index])[0] for index in range(3)] == [(), (*b"b", EOS), (*b"ab", EOS)]
    assert all(deltas[-1].finish_reason is FinishReason.STOP for deltas in rest.values())


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"delivered": ((1,), (2,))}, "more than the 1 choices"),
        ({"finished": frozenset({1})}, "more than the 1 choices"),
        ({"finished": frozenset({-1})}, "more than the 1 choices"),
        ({"finished": frozenset({0})}, "leaves nothing"),
        ({"delivered": ((1, 2, 3),), "max_tokens": 2}, "3 tokens of a choice that may have 2"),
        ({"delivered": ((1,) * 63,)}, "63 tokens of a choice that may have 62"),
        ({"delivered": ((1, 256),)}, "not in the vocabulary"),
        ({"delivered": ((1, -1),)}, "not in the vocabulary"),
        ({"delivered": ((1, EOS, 1),)}, "goes on after its end"),
        ({"delivered": ((*b"stop it",),), "stop": ("stop",)}, "goes on after its end"),
    ],
)
def test_a_beginning_that_no_answer_can_have_is_refused(values: dict[str, Any], problem: str) -> None:
    engine, _ = script_engine(speaker("x"))
    with pytest.raises(InvalidRequest, match=problem) as caught:
        engine.add(request(**values))
    assert caught.value.field == "delivered"
    assert not engine.live_request_ids
    assert not engine.has_work


def test_delivered_tokens_count_as_work_until_they_are_computed() -> None:
    engine, _ = script_engine(speaker("x" * 60))
    engine.add(request(delivered=((*b"xxxxxx",),), max_tokens=10))
    assert engine.load().outstanding_tokens == 2 + 6 + 4
    engine.step()
    assert engine.load().outstanding_tokens <= 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(0, 2**32), st.integers(18, 60))
def test_resumed_answers_are_exact_under_memory_pressure(cut: int, seed: int, num_blocks: int) -> None:
    def echo(sequence: Sequence) -> int:
        return 1 + (sum(sequence.token_ids) * 31 + len(sequence.token_ids) + seed) % 255

    def whole_of(place: int) -> tuple[int, ...]:
        engine, _ = script_engine(echo)
        return of(answer(engine, request(prompt="p" * (place + 1), max_tokens=40, ignore_eos=True))[0])[0]

    engine, _ = script_engine(echo, num_blocks=num_blocks)
    wholes = [whole_of(place) for place in range(6)]
    for place, whole in enumerate(wholes):
        delivered = (whole[: (cut + 5 * place) % 40],)
        engine.add(request(f"r{place}", prompt="p" * (place + 1), delivered=delivered, max_tokens=40, ignore_eos=True))
    got: dict[str, list[int]] = {}
    for event in run(engine):
        assert isinstance(event, ChoiceDelta)
        got.setdefault(event.request_id, []).extend(event.token_ids)
    assert got == {f"r{place}": list(whole[(cut + 5 * place) % 40 :]) for place, whole in enumerate(wholes)}


def steps_of(runner: ScriptRunner) -> list[set[str]]:
    return [{segment.sequence.request.request_id for segment in batch.segments} for batch in runner.batches]


def phases_of(engine: Engine) -> list[tuple[str, Phase]]:
    assert engine.phases is not None
    return [(phase.request_id, phase.phase) for phase in engine.phases]


def test_a_request_is_scheduled_once_and_those_in_the_queue_are_not() -> None:
    engine, _ = script_engine(speaker("abc"), max_batch=1)
    engine.phases = []
    engine.add(request("first", n=2))
    engine.add(request("second"))
    engine.step()
    assert phases_of(engine) == [("first", Phase.SCHEDULED)]
    run(engine)
    assert {name for name, _ in phases_of(engine)} == {"first", "second"}


@pytest.mark.parametrize("num_tokens", [2, 5])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_trial_has_its_first_steps_alone_and_is_announced_before_and_after(
    num_tokens: int, prefix_cache: bool
) -> None:
    engine, runner = script_engine(speaker("a" * 30), prefix_cache=prefix_cache)
    engine.phases = []
    for name in ("x", "y"):
        engine.add(request(name, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(request("late", max_tokens=20))
    engine.add(request("trial", prompt="a prompt of more than one block", n=2, is_trial=True, trial_tokens=num_tokens))
    before = len(runner.batches)
    while ("trial", Phase.TRIAL_BEGAN) not in phases_of(engine):
        engine.step()
    assert not any("trial" in step for step in steps_of(runner)), "announced after its first step"
    while ("trial", Phase.TRIAL_PASSED) not in phases_of(engine):
        engine.step()
    alone = [step for step in steps_of(runner)[before:] if "trial" in step]
    assert all(step == {"trial"} for step in alone)
    (live,) = [live for name, live in engine._live.items() if name == "trial"]
    assert all(choice.sequence.num_chosen_here >= num_tokens for choice in live.choices)
    together = len(runner.batches)
    events = run(engine)
    assert any(len(step) > 1 and "trial" in step for step in steps_of(runner)[together:])
    assert {event.request_id for event in events} == {"x", "y", "late", "trial"}
    assert [phase for _, phase in phases_of(engine)].count(Phase.TRIAL_BEGAN) == 1


def test_an_answer_that_was_under_way_elsewhere_goes_on_before_others_begin_in_the_order_in_which_such_came() -> None:
    engine, runner = script_engine(speaker("abcdefgh"), max_batch=1)
    for name in ("runs", "waits"):
        engine.add(request(name))
    engine.step()
    for name in ("moved", "moved later"):
        engine.add(request(name, delivered=(tuple(b"abc"),), is_moved=True))
    engine.add(request("resumed by its client", delivered=(tuple(b"abc"),)))
    events = run(engine)
    first = dict.fromkeys(event.request_id for event in events)
    assert list(first) == ["runs", "moved", "moved later", "waits", "resumed by its client"]
    assert runner.batches


def test_no_step_is_under_way_when_a_trial_begins_or_has_passed() -> None:
    engine, runner = script_engine(speaker("a" * 30))
    engine.phases = []
    engine.add(request("x", max_tokens=20))
    engine.step()
    engine.add(request("trial", is_trial=True))
    for phase in (Phase.TRIAL_BEGAN, Phase.TRIAL_PASSED):
        while ("trial", phase) not in phases_of(engine):
            engine.step()
        assert not engine._under_way
        assert engine.notice is not None
        engine.notice = None
    assert runner.batches


@pytest.mark.parametrize("moment", ["queued", "begun", "running"])
def test_a_trial_that_is_cancelled_holds_nobody_up(moment: str) -> None:
    engine, _ = script_engine(speaker("abc"))
    engine.phases = []
    engine.add(request("x"))
    engine.add(request("trial", is_trial=True, trial_tokens=3))
    for _ in range({"queued": 0, "begun": 1, "running": 3}[moment]):
        engine.step()
    engine.cancel("trial")
    engine.add(request("y"))
    assert {event.request_id for event in run(engine)} == {"x", "y"}
    assert engine.scheduler.trial is None


def test_a_trial_without_room_for_all_its_choices_passes_with_those_that_run() -> None:
    engine, _ = script_engine(speaker("a" * 30), max_batch=2)
    engine.phases = []
    engine.add(request("x", max_tokens=8))
    engine.step()
    engine.add(request("trial", n=4, is_trial=True, max_tokens=6))
    events = run(engine)
    ended = {(event.request_id, event.index) for event in events if isinstance(event, ChoiceDelta)}
    assert ended >= {("trial", index) for index in range(4)}
    assert phases_of(engine).count(("trial", Phase.TRIAL_PASSED)) == 1


def test_trials_come_one_after_another() -> None:
    engine, runner = script_engine(speaker("a" * 30))
    engine.phases = []
    for name in ("a", "b", "c"):
        engine.add(request(name, is_trial=True, max_tokens=9))
    run(engine)
    told = [entry for entry in phases_of(engine) if entry[1] is not Phase.SCHEDULED]
    assert [name for name, _ in told] == [name for name, _ in told[::2] for _ in range(2)]
    assert [phase for _, phase in told] == [Phase.TRIAL_BEGAN, Phase.TRIAL_PASSED] * 3
    assert len(steps_of(runner)) > 0


def test_the_thread_waits_until_a_trial_is_known_of() -> None:
    engine, runner = script_engine(speaker("a" * 30))
    begun, ended = threading.Event(), threading.Event()
    seen: list[Any] = []

    def sink(events: Any) -> None:
        for event in events:
            if isinstance(event, RequestPhase) and event.phase is Phase.TRIAL_BEGAN:
                seen.append(event.seen)
                begun.set()
            elif isinstance(event, RequestPhase) and event.seen is not None:
                event.seen.set()
            elif isinstance(event, ChoiceDelta) and event.finish_reason is not None:
                ended.set()

    thread = EngineThread(engine, sink)
    try:
        thread.submit(request(is_trial=True))
        assert begun.wait(20)
        assert not ended.wait(0.1)
        assert not runner.batches
        seen[0].set()
        assert ended.wait(20)
    finally:
        thread.stop()
