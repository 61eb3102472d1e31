"""The pieces a replica is made of, without a network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from cluster.replica.events import EventFanout
from cluster.replica.flush import FlushPolicy
from cluster.replica.lifecycle import Lifecycle, State
from cluster.replica.live_request import LiveRequest, Origin
from cluster.replica.server import create_incarnation
from cluster.replica.text import MAX_BYTES_PER_TOKEN, Texts
from protos import generation_pb2 as pb
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from worker.errors import InvalidRequest, NumericalError
from worker.request import ChoiceDelta, EngineEvent, FinishReason, RequestFailed, Timings


class NoOutbox:
    def touch(self, live: LiveRequest) -> None: ...

    def settle(self) -> None: ...


def live_request(num_choices: int = 1) -> LiveRequest:
    origin = Origin("replica", attempt=2)
    return LiveRequest(request_id="r", engine_id="r/0", num_choices=num_choices, origin=origin, outbox=NoOutbox())


def delta(*ids: int, index: int = 0, is_last: bool = False) -> ChoiceDelta:
    return ChoiceDelta(
        request_id="r/0",
        index=index,
        token_ids=ids,
        text="".join(map(chr, ids)),
        finish_reason=FinishReason.LENGTH if is_last else None,
        prompt_tokens=5,
        tier=64,
        bucket=8,
        timings=Timings(queue_s=0.001, prefill_s=0.002, decode_s=0.003) if is_last else None,
    )


def test_several_steps_cost_one_message() -> None:
    live = live_request()
    live.add(delta(65))
    first = live.take()
    for token in (66, 67, 68):
        live.add(delta(token))
    second = live.take()
    assert first is not None
    assert second is not None
    assert (first.sequence, list(first.choices[0].token_ids)) == (0, [65])
    assert (second.sequence, list(second.choices[0].token_ids), second.choices[0].text) == (1, [66, 67, 68], "BCD")


def test_the_first_token_and_the_end_are_urgent_and_nothing_between() -> None:
    live = live_request()
    urgencies = []
    for event in (delta(65), delta(66), delta(67), delta(68, is_last=True)):
        live.add(event)
        urgencies.append(live.is_urgent)
        live.take()
    assert urgencies == [True, False, False, True]


def test_the_first_piece_counts_the_prompt_and_the_last_one_everything() -> None:
    live = live_request()
    live.add(delta(65))
    first = live.take()
    live.add(delta(66, is_last=True))
    last = live.take()
    assert first is not None
    assert last is not None
    assert first.usage == pb.Usage(prompt_tokens=5)
    assert not first.HasField("execution")
    assert last.usage == pb.Usage(prompt_tokens=5, completion_tokens=2)
    assert last.execution == pb.Execution(replica="replica", tier=64, bucket=8, runner="eager", attempts=2)
    assert (last.timings.queue_ms, last.timings.prefill_ms, last.timings.decode_ms) == (1, 2, 3)


def test_an_answer_of_several_choices_ends_with_the_last_of_them() -> None:
    live = live_request(num_choices=2)
    live.add(delta(65, index=1, is_last=True))
    piece = live.take()
    assert piece is not None
    assert not piece.HasField("execution")
    endings = [live.has_ended]
    live.add(delta(66, index=0, is_last=True))
    endings.append(live.has_ended)
    assert endings == [False, True]
    last = live.take()
    assert last is not None
    assert last.usage.completion_tokens == 2


def test_an_error_follows_the_tokens_that_came_before_it() -> None:
    live = live_request()
    live.add(delta(65))
    live.add(RequestFailed("r/0", NumericalError()))
    live.add(delta(66))
    piece = live.take()
    assert piece is not None
    assert list(piece.choices[0].token_ids) == [65]
    assert isinstance(live.error, NumericalError)
    assert live.has_ended
    assert live.is_urgent
    assert live.take() is None


def test_a_complete_answer_cannot_fail_any_more() -> None:
    live = live_request()
    live.add(delta(65, is_last=True))
    live.fail(NumericalError())
    assert live.error is None


@pytest.mark.parametrize(("num_live", "expected"), [(1, 0.008), (20, 0.008), (100, 0.04), (1000, 0.064)])
def test_the_flush_interval_widens_with_load_up_to_its_limit(num_live: int, expected: float) -> None:
    policy = FlushPolicy(interval_s=0.008, max_interval_s=0.064, cost_s=0.0002)
    assert policy.interval(num_live) == pytest.approx(expected)


def test_an_interval_of_zero_stays_zero() -> None:
    assert FlushPolicy(interval_s=0, max_interval_s=0.064, cost_s=0.0002).interval(500) == 0


def test_a_replica_goes_down_its_states_and_never_up() -> None:
    lifecycle, seen = Lifecycle(), []
    unsubscribe = lifecycle.subscribe(lambda: seen.append(lifecycle.state))
    assert lifecycle.advance(State.READY)
    assert lifecycle.advance(State.DRAINING)
    assert not lifecycle.advance(State.READY)
    assert lifecycle.advance(State.STOPPED)
    assert not lifecycle.advance(State.FAILED)
    unsubscribe()
    assert seen == [State.READY, State.DRAINING, State.STOPPED]


def test_a_failed_replica_stays_failed() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.advance(State.FAILED)
    assert not lifecycle.advance(State.STOPPED)


def test_a_later_process_sorts_after_an_earlier_one() -> None:
    earlier = create_incarnation()
    threading.Event().wait(0.003)
    assert earlier < create_incarnation()


async def test_events_cross_threads_in_order_and_waiting_steps_are_taken_together() -> None:
    received: list[list[EngineEvent]] = []
    done = asyncio.Event()
    fanout = EventFanout()
    wakeups = 0
    loop = asyncio.get_running_loop()

    def receive(events: Sequence[EngineEvent]) -> None:
        received.append(list(events))
        if len(received) == 1000:
            done.set()

    fanout([delta(0)])
    fanout.connect(loop, receive)
    original = fanout._deliver

    def counted() -> None:
        nonlocal wakeups
        wakeups += 1
        original()

    fanout._deliver = counted  # type: ignore[method-assign]

    def engine() -> None:
        for step in range(1, 1000):
            fanout([delta(step)])

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    await asyncio.wait_for(done.wait(), 10)
    ids = [event.token_ids[0] for events in received for event in events if isinstance(event, ChoiceDelta)]
    assert ids == list(range(1000))
    assert wakeups < 10


async def test_an_engine_that_outlives_its_host_is_not_harmed() -> None:
    fanout = EventFanout()
    loop = asyncio.new_event_loop()
    fanout.connect(loop, lambda _: None)
    loop.close()
    fanout([delta(1)])


def texts(text: ScriptText | None, inline_bytes: int = 100) -> Texts:
    engine = ScriptEngine(lambda _: None, ScriptKnobs(max_model_len=64))
    engine.stop()
    return Texts(text, engine.info, inline_bytes=inline_bytes)


async def test_long_texts_are_tokenised_off_the_event_loop_and_short_ones_on_it() -> None:
    threads: list[str] = []
    texts_ = texts(ScriptText(on_encode=lambda _: threads.append(threading.current_thread().name)), inline_bytes=4)
    assert await texts_.encode("abcd", add_special_tokens=False) == [100, 101, 102, 103]
    assert len(await texts_.encode("abcde", add_special_tokens=True)) == 6
    texts_.close()
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("graphpool-text")


async def test_a_text_that_cannot_fit_is_refused_without_tokenising_it() -> None:
    encoded: list[str] = []
    texts_ = texts(ScriptText(on_encode=encoded.append))
    with pytest.raises(InvalidRequest, match=r"text: .* bytes cannot fit"):
        await texts_.encode("a" * (64 * MAX_BYTES_PER_TOKEN + 1), add_special_tokens=True)
    with pytest.raises(InvalidRequest, match=r"messages: .* bytes cannot fit"):
        await texts_.render([("user", "a" * 64 * MAX_BYTES_PER_TOKEN), ("assistant", "b")])
    assert encoded == []
    texts_.close()


async def test_a_model_without_tokenizer_says_so_for_each_kind_of_text() -> None:
    texts_ = texts(None)
    with pytest.raises(InvalidRequest, match=r"text: .*without a tokenizer"):
        await texts_.prompt(pb.GenerateRequest(text="x"))
    with pytest.raises(InvalidRequest, match=r"messages: .*without a tokenizer"):
        await texts_.prompt(pb.ChatRequest(messages=[pb.ChatMessage(role="user")]))
    with pytest.raises(InvalidRequest, match=r"token_ids: .*without a tokenizer"):
        await texts_.decode([1], skip_special_tokens=False)
    assert await texts_.prompt(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))) == (1, 2)
    texts_.close()


async def test_a_model_without_chat_template_refuses_conversations_only() -> None:
    text = ScriptText()
    text.has_chat_template = False
    texts_ = texts(text)
    with pytest.raises(InvalidRequest, match=r"messages: .*no chat template"):
        await texts_.render([("user", "x")])
    assert await texts_.prompt(pb.GenerateRequest(text="a")) == (1, 100)
    texts_.close()
