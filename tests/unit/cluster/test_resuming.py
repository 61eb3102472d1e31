"""What a router keeps of answers, makes of losses and remembers of poison; how a client goes on elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.client.endpoints import Endpoint, Endpoints, addresses_of, check_addresses
from cluster.client.failover import Failover, Progress
from cluster.codec import AnyRequest
from cluster.config import ClientConfig
from cluster.delivered import Delivered
from cluster.errors import PoisonedRequest
from cluster.router.jitter import Jitter
from cluster.router.loss import LossKind, Verdict, judge, trial_shares
from cluster.router.quarantine import MAX_ENTRIES, Quarantine, fingerprint
from cluster.router.resuming import MIN_TRIAL_TOKENS, trial_tokens
from cluster.router.stream import LinkStream
from cluster.router.trials import Trials
from protos import generation_pb2 as pb
from protos import replica_pb2
from tests.fakes.fake_link import FakeLink
from tests.fakes.script_runner import ManualClock
from worker.errors import InvalidRequest

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS


def piece(sequence: int, *choices: tuple[int, list[int], bool], is_last: bool = False) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id="r", sequence=sequence)
    for index, token_ids, has_ended in choices:
        reason = pb.FINISH_REASON_STOP if has_ended else pb.FINISH_REASON_UNSPECIFIED
        response.choices.add(index=index, token_ids=token_ids, finish_reason=reason)
    if is_last:
        response.timings.SetInParent()
    return response


def test_what_is_delivered_adds_up_over_messages_and_survives_the_wire() -> None:
    delivered = Delivered()
    for one in (piece(0, (1, [7], False)), piece(1, (0, [1, 2], False), (1, [8], True)), piece(2, (0, [3], False))):
        delivered.note(one)
    assert (delivered.by_choice, delivered.finished, delivered.next_sequence) == (((1, 2, 3), (7, 8)), {1}, 3)
    assert (delivered.num_tokens, delivered.longest, delivered.is_complete) == (5, 3, False)
    again = Delivered.from_proto(delivered.to_proto(), delivered.next_sequence)
    assert (again.by_choice, again.finished, again.next_sequence) == (((1, 2, 3), (7, 8)), {1}, 3)
    delivered.note(piece(3, (0, [4], True), is_last=True))
    assert delivered.is_complete


def test_choices_without_tokens_are_empty_and_nothing_is_nothing() -> None:
    delivered = Delivered()
    assert (delivered.by_choice, delivered.num_tokens, delivered.to_proto()) == ((), 0, [])
    delivered.note(piece(0, (2, [9], False)))
    assert delivered.by_choice == ((), (), (9,))


@pytest.mark.parametrize(
    ("choices", "next_sequence", "field"),
    [
        ([pb.DeliveredChoice(index=8)], 1, "delivered"),
        ([pb.DeliveredChoice(index=1), pb.DeliveredChoice(index=1)], 1, "delivered"),
        ([pb.DeliveredChoice(token_ids=[1])], 0, "next_sequence"),
        ([pb.DeliveredChoice(is_finished=True)], 0, "next_sequence"),
    ],
)
def test_what_nobody_can_have_is_refused(choices: list[pb.DeliveredChoice], next_sequence: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Delivered.from_proto(choices, next_sequence)
    assert caught.value.field == field


@dataclass(slots=True)
class Seen:
    """See cluster.router.loss.Witnessed."""

    is_scheduled: bool = False
    is_on_trial: bool = False


RUNS, WAITS = Seen(is_scheduled=True), Seen()
TRIED = Seen(is_scheduled=True, is_on_trial=True)
INNOCENT, SUSPECT = Verdict.INNOCENT, Verdict.SUSPECT


@pytest.mark.parametrize(
    ("streams", "max_rows", "verdicts"),
    [
        ([RUNS, RUNS], 8, [SUSPECT, SUSPECT]),
        ([RUNS, RUNS, WAITS], 2, [SUSPECT, SUSPECT, INNOCENT]),
        ([RUNS, WAITS, WAITS, WAITS], 3, [SUSPECT, SUSPECT, SUSPECT, INNOCENT]),
        ([WAITS, RUNS, WAITS], 2, [SUSPECT, SUSPECT, INNOCENT]),
        ([RUNS, WAITS], 0, [SUSPECT, SUSPECT]),
        ([], 4, []),
    ],
)
def test_a_crash_makes_suspects_of_those_that_may_have_been_in_steps(
    streams: list[Seen], max_rows: int, verdicts: list[Verdict]
) -> None:
    assert judge(streams, LossKind.CRASHED, max_rows=max_rows) == verdicts
    assert judge(streams, LossKind.STALLED, max_rows=max_rows) == verdicts
    assert judge(streams, LossKind.SILENT, max_rows=max_rows) == [INNOCENT] * len(streams)


def test_a_trial_clears_all_others_whatever_becomes_of_it() -> None:
    streams = [RUNS, TRIED, WAITS]
    assert judge(streams, LossKind.CRASHED, max_rows=8) == [INNOCENT, Verdict.GUILTY, INNOCENT]
    assert judge(streams, LossKind.STALLED, max_rows=8) == [INNOCENT, Verdict.STALLED_ALONE, INNOCENT]
    assert judge(streams, LossKind.SILENT, max_rows=8) == [INNOCENT] * 3


@given(st.integers(1, 200))
def test_trials_share_all_of_their_time_and_the_likeliest_get_most(num_suspects: int) -> None:
    shares = trial_shares(num_suspects)
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)


def test_a_trial_reaches_as_far_as_the_replica_may_have_been_if_there_is_time() -> None:
    assert trial_tokens(0.0, 0.002, 0.5) == MIN_TRIAL_TOKENS
    assert trial_tokens(0.016, 0.002, 0.5) == MIN_TRIAL_TOKENS + 8
    assert trial_tokens(0.016, 0.002, 0.0115) == 3
    assert trial_tokens(10.0, 0.002, 0.0) == MIN_TRIAL_TOKENS
    assert trial_tokens(0.05, 0.0, 0.5) > MIN_TRIAL_TOKENS


def test_of_a_young_request_all_steps_count_that_brought_nothing() -> None:
    assert trial_tokens(0.016, 0.002, 0.5, age_s=0.1, num_delivered=20) == MIN_TRIAL_TOKENS + 30
    assert trial_tokens(0.016, 0.002, 0.5, age_s=0.1, num_delivered=60) == MIN_TRIAL_TOKENS + 8
    assert trial_tokens(0.016, 0.002, 0.5, age_s=60.0, num_delivered=20) == MIN_TRIAL_TOKENS + 8


def stream_on(link: FakeLink) -> LinkStream:
    untyped: Any = link
    return LinkStream(untyped, 1, prompt_cost=1, cost=10, limit=10, next_sequence=4)


def test_phases_and_pieces_tell_how_far_a_stream_is() -> None:
    stream, passed = stream_on(FakeLink()), []
    stream.on_trial_passed = lambda: passed.append(True)
    stages = []
    for phase in ("SCHEDULED", "TRIAL_BEGAN", "TRIAL_PASSED"):
        value = replica_pb2.StreamPhase.Value(f"STREAM_PHASE_{phase}")
        stream.push(replica_pb2.StreamEvent(stream_id=1, phase=value))
        stages.append((stream.is_scheduled, stream.is_on_trial, bool(passed)))
    assert stages == [(True, False, False), (True, True, False), (True, False, True)]
    other = stream_on(FakeLink())
    assert not other.is_scheduled
    other.push(replica_pb2.StreamEvent(stream_id=1, response=piece(4, (0, [1], False))))
    assert other.is_scheduled


async def test_a_resumed_stream_begins_with_the_message_that_is_due() -> None:
    stream = stream_on(FakeLink())
    for sequence in (4, 5):
        stream.push(replica_pb2.StreamEvent(stream_id=1, response=piece(sequence, (0, [1], False)), end=sequence == 5))
    assert [one.sequence async for one in stream] == [4, 5]


def test_one_suspect_at_a_time_is_tried_on_a_replica() -> None:
    changes: list[bool] = []
    trials = Trials(lambda: changes.append(True), lambda: 4, lambda: 0.01)
    link: Any = FakeLink()
    other: Any = FakeLink()
    here, there = stream_on(link), stream_on(other)
    trials.begin(link, here)
    assert not trials.may_begin(link)
    assert trials.may_begin(other)
    trials.end(link, there)
    assert not trials.may_begin(link)
    trials.end(link, here)
    assert trials.may_begin(link)
    assert changes == [True]


@pytest.mark.parametrize(("num_replicas", "num_places"), [(0, 1), (1, 1), (3, 1), (4, 2), (9, 4)])
def test_suspects_are_tried_on_half_of_the_replicas_at_most(num_replicas: int, num_places: int) -> None:
    trials = Trials(lambda: None, lambda: num_replicas, lambda: 0.01)
    links: list[Any] = [FakeLink() for _ in range(num_places + 1)]
    for link in links[:num_places]:
        assert trials.may_begin(link)
        trials.begin(link, stream_on(link))
        assert trials.is_under_way(link)
    assert not trials.may_begin(links[-1])
    assert not trials.is_under_way(links[-1])


@pytest.mark.parametrize(
    ("step_s", "num_suspects", "num_places"), [(0.01, 14, 2), (0.01, 15, 3), (0.01, 99, 4), (0.02, 8, 3)]
)
def test_so_many_suspects_that_they_would_wait_for_long_are_tried_in_more_places(
    step_s: float, num_suspects: int, num_places: int
) -> None:
    trials = Trials(lambda: None, lambda: 4, lambda: step_s)
    with contextlib.ExitStack() as stack:
        for _ in range(num_suspects):
            stack.enter_context(trials.waiting())
        assert trials.num_places == num_places
    assert trials.num_places == 2


def poison(prompt: str = "x", **values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=5), **values)


def test_requests_are_alike_whatever_their_id_their_seed_and_their_cached_blocks() -> None:
    same = poison(request_id="a", cache_salt="s", use_prefix_cache=False)
    same.sampling.seed = 9
    assert fingerprint(same) == fingerprint(poison(request_id="b"))
    assert same.sampling.seed == 9
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=same.sampling)
    others: list[AnyRequest] = [poison("y"), poison(model="m"), chat, pb.GenerateRequest(text="x")]
    assert len({fingerprint(one) for one in (same, *others)}) == 5


def test_quarantine_ends_and_holds_the_newest_only() -> None:
    clock = ManualClock()
    quarantine = Quarantine(10.0, clock=clock)
    quarantine.check(poison())
    quarantine.add(poison())
    with pytest.raises(PoisonedRequest):
        quarantine.check(poison(request_id="again"))
    quarantine.check(poison("y"))
    clock.now_s += 10
    quarantine.check(poison())
    assert len(quarantine) == 0
    for number in range(MAX_ENTRIES + 1):
        quarantine.add(poison(str(number)))
    assert len(quarantine) == MAX_ENTRIES
    quarantine.check(poison("0"))


def test_what_another_router_found_guilty_is_refused_for_what_is_left_of_its_time() -> None:
    clock = ManualClock()
    told: list[Mapping[bytes, float]] = []
    finder = Quarantine(60.0, secret=lambda: "s", on_verdict=told.append, clock=clock)
    finder.add(poison())
    assert told == [finder.verdicts]
    other = Quarantine(600.0, secret=lambda: "s", clock=clock)
    ((key, ttl_s),) = told[0].items()
    other.learn(key, ttl_s)
    with pytest.raises(PoisonedRequest):
        other.check(poison(request_id="again"))
    clock.now_s += 40
    other.learn(key, 60.0)  # old news that comes around again
    clock.now_s += 30
    other.check(poison())


def test_nothing_learned_lasts_longer_than_this_router_would_have_it() -> None:
    clock = ManualClock()
    quarantine = Quarantine(10.0, clock=clock)
    quarantine.learn(fingerprint(poison()), 1e9)
    assert list(quarantine.verdicts.values()) == [10.0]
    for key, ttl_s in ((b"short", 60.0), (bytes(16), 0.0), (bytes(16), -1.0)):
        quarantine.learn(key, ttl_s)
    assert len(quarantine) == 1
    off = Quarantine(0.0, clock=clock)
    off.learn(fingerprint(poison()), 60.0)
    off.check(poison())


def test_a_fingerprint_is_of_no_use_without_the_secret() -> None:
    keys = {fingerprint(poison(), secret) for secret in ("", "a", "b", "a" * 200)}
    assert len(keys) == 4
    quarantine = Quarantine(10.0, secret=lambda: "a")
    for secret in ("", "b"):
        quarantine.learn(fingerprint(poison(), secret), 60.0)
    quarantine.check(poison())


def test_addresses_are_a_list_or_separated_by_commas_and_each_counts_once() -> None:
    assert addresses_of("a:1", ()) == ("a:1",)
    assert addresses_of(" a:1, b:2,,a:1", ("c:3", "b:2")) == ("a:1", "b:2", "c:3")
    with pytest.raises(ValueError, match="no address"):
        addresses_of(" ,", ())
    check_addresses("address", "localhost:1, 127.0.0.1:2")
    with pytest.raises(ValueError, match="address"):
        check_addresses("address", "localhost:1,nowhere")


class FakeChannel:
    """Makes stubs that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: lambda request, timeout=None: (arguments[0], request, timeout)


def endpoints(*addresses: str) -> Endpoints:
    return Endpoints(addresses, lambda _: FakeChannel())


def test_a_server_that_failed_several_calls_is_left_once() -> None:
    servers = endpoints("a:1", "b:2", "c:3")
    first = servers.current
    assert [servers.leave(first).address for _ in range(3)] == ["b:2"] * 3
    assert servers.leave(servers.current).address == "c:3"
    assert servers.leave(servers.current) is first


def test_every_server_is_asked_at_once_before_anybody_is_asked_again() -> None:
    failover = Failover(3, ClientConfig(max_attempts=2, backoff_min_s=0.1, backoff_max_s=0.15), None)
    pauses = [failover.pause_s(UNAVAILABLE) for _ in range(7)]
    assert pauses == [0.0, 0.0, 0.1, 0.1, 0.1, 0.15, None]
    failover.note_progress()
    assert failover.pause_s(UNAVAILABLE) == 0.0


def test_only_what_another_server_can_mend_is_taken_there() -> None:
    failover = Failover(2, ClientConfig(), 5.0)
    assert failover.pause_s(grpc.StatusCode.INTERNAL) is None
    assert failover.pause_s(ALREADY_EXISTS) is None
    assert failover.pause_s(ALREADY_EXISTS, is_resuming=True) == 0.0
    assert Failover(1, ClientConfig(), None).pause_s(UNAVAILABLE) is None
    assert failover.timeout_s is not None
    assert 4 < failover.timeout_s <= 5
    assert Failover(1, ClientConfig(), None).timeout_s is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_call_asks_for_what_is_missing_with_the_seed_of_the_first_message(is_chat: bool) -> None:
    endpoint: Endpoint = endpoints("a:1").current
    request: Any = pb.ChatRequest() if is_chat else pb.GenerateRequest(text="x")
    progress = Progress(request)
    method, sent, timeout_s = progress.call(endpoint, 3.0)
    assert method.endswith("/ChatStream" if is_chat else "/GenerateStream")
    assert (sent, timeout_s, progress.has_begun) == (request, 3.0, False)
    first = piece(0, (0, [5, 6], False))
    first.seed = 77
    progress.note(first)
    progress.note(piece(1, (0, [7], False)))
    method, sent, _ = progress.call(endpoint, None)
    assert method.endswith("/ResumeChat" if is_chat else "/Resume")
    assert (sent.next_sequence, list(sent.delivered[0].token_ids)) == (2, [5, 6, 7])
    assert (sent.request.sampling.seed, sent.request.request_id) == (77, "r")
    assert progress.has_begun
    assert not progress.is_complete


def test_reports_that_come_unevenly_say_how_far_behind_messages_may_be() -> None:
    jitter = Jitter()
    assert jitter.spread_s(5.0) == 0
    for now_s in (0.0, 0.25, 0.50, 0.85):
        jitter.note(now_s)
    assert jitter.spread_s(0.86) == pytest.approx(0.10)
    assert jitter.spread_s(1.85) == pytest.approx(0.75)
    for now_s in range(1, 12):
        jitter.note(float(now_s))
    assert jitter.spread_s(11.5) == pytest.approx(0.0)
    jitter.forget()
    assert jitter.spread_s(99.0) == 0


async def test_a_replica_cannot_have_been_further_than_since_it_got_the_request() -> None:
    stream = stream_on(FakeLink())
    stream.lose(LossKind.CRASHED, SUSPECT, 0.5, 100.0)
    assert 0 <= stream.unheard_s < 1
    assert stream.trial_share == 0.5
