"""The pieces a router is made of, without a network."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec import AnyRequest
from cluster.errors import (
    BrokenStream,
    CanaryFailed,
    RemoteError,
    ReplicaLost,
    ReplicaUnresponsive,
    ReplicaUnsound,
    SlowReader,
)
from cluster.heap import growing_heap, settle_heap
from cluster.router.answering import Answering
from cluster.router.canary import NUM_TOKENS, canary_request, run_canary
from cluster.router.loss import LossKind
from cluster.router.stream import LinkStream
from protos import control_pb2, replica_pb2
from protos import generation_pb2 as pb
from tests.fakes.fake_link import FakeLink
from worker.errors import DeadlineExceeded, RequestAborted


def open_stream(link: FakeLink, *, cost: int = 20, prompt_cost: int = 5, limit: int = 100) -> LinkStream:
    untyped: Any = link
    link.outstanding_tokens += cost
    return LinkStream(untyped, 1, prompt_cost=prompt_cost, cost=cost, limit=limit)


def piece(sequence: int, num_tokens: int, *, end: bool = False) -> replica_pb2.StreamEvent:
    response = pb.GenerateResponse(sequence=sequence, choices=[pb.Choice(token_ids=range(num_tokens))])
    return replica_pb2.StreamEvent(stream_id=1, response=response, end=end)


async def read(stream: LinkStream) -> list[int]:
    return [len(response.choices[0].token_ids) async for response in stream]


async def test_a_stream_gives_its_pieces_in_order_and_ends() -> None:
    stream = open_stream(FakeLink())
    for event in (piece(0, 1), piece(1, 2), piece(2, 3, end=True)):
        stream.push(event)
    assert await read(stream) == [1, 2, 3]


async def test_outstanding_tokens_fall_with_what_arrives_and_are_gone_at_the_end() -> None:
    link = FakeLink()
    stream, seen = open_stream(link), []
    for event in (piece(0, 1), piece(1, 4), piece(2, 3, end=True)):
        stream.push(event)
        seen.append(link.outstanding_tokens)
    assert seen == [20 - 5 - 1, 20 - 5 - 1 - 4, 0]


@given(
    st.lists(st.tuples(st.integers(0, 400), st.lists(st.integers(0, 50), max_size=10), st.booleans()), max_size=20),
)
def test_outstanding_tokens_return_to_zero_however_streams_end(
    streams: Sequence[tuple[int, Sequence[int], bool]],
) -> None:
    link = FakeLink()
    for cost, pieces, is_lost in streams:
        stream = open_stream(link, cost=cost, prompt_cost=cost // 2)
        for sequence, num_tokens in enumerate(pieces):
            stream.push(piece(sequence, num_tokens))
            assert link.outstanding_tokens >= 0
        if is_lost:
            stream.lose(LossKind.CRASHED)
        stream.close()
    assert link.outstanding_tokens == 0


async def test_an_error_comes_after_the_pieces_that_arrived_before_it() -> None:
    stream = open_stream(FakeLink())
    stream.push(piece(0, 1))
    error = replica_pb2.StreamError(code=13, message="NaN")
    stream.push(replica_pb2.StreamEvent(stream_id=1, error=error, end=True))
    assert (await anext(stream)).sequence == 0
    with pytest.raises(RemoteError, match="NaN"):
        await anext(stream)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (LossKind.CRASHED, ReplicaLost),
        (LossKind.SILENT, ReplicaUnresponsive),
        (LossKind.STALLED, ReplicaUnresponsive),
        (LossKind.UNSOUND, ReplicaUnsound),
    ],
)
async def test_a_lost_replica_ends_its_streams_with_the_number_of_tokens_that_came(
    loss: LossKind, kind: type[ReplicaLost]
) -> None:
    stream = open_stream(FakeLink())
    stream.push(piece(0, 3))
    stream.lose(loss)
    await anext(stream)
    with pytest.raises(kind) as caught:
        await anext(stream)
    assert type(caught.value) is kind
    assert caught.value.delivered == 3


async def test_a_waiting_reader_learns_of_the_loss() -> None:
    stream = open_stream(FakeLink())
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.lose(LossKind.CRASHED)
    with pytest.raises(ReplicaLost):
        await reader


async def test_closing_early_cancels_on_the_replica_and_closing_late_does_not() -> None:
    early, late = FakeLink(), FakeLink()
    open_stream(early).close()
    stream = open_stream(late)
    stream.push(piece(0, 1, end=True))
    stream.close()
    assert (early.forgotten, late.forgotten) == ([(1, True)], [(1, False)])


async def test_a_gap_in_the_sequence_ends_the_stream_on_both_sides() -> None:
    link = FakeLink()
    stream = open_stream(link)
    stream.push(piece(0, 1))
    stream.push(piece(2, 1))
    with pytest.raises(BrokenStream, match=r"message 2 .* where 1"):
        await read(stream)
    assert link.forgotten == [(1, True)]
    assert link.outstanding_tokens == 0


async def test_a_reader_that_falls_behind_costs_a_bounded_number_of_messages() -> None:
    link = FakeLink()
    stream = open_stream(link, cost=10_000, limit=8)
    for sequence in range(1000):
        stream.push(piece(sequence, 1))
    assert len(stream._pieces) <= 8
    assert link.forgotten == [(1, True)]
    assert link.outstanding_tokens == 0
    with pytest.raises(SlowReader):
        await read(stream)


class FakeCanaryTarget:
    """Answers canaries from a script: token ids of each piece, or an error to raise."""

    def __init__(self, *answer: list[int] | Exception, vocab_size: int = 100, delay_s: float = 0.0) -> None:
        self.name = "replica"
        self.model: control_pb2.ModelInfo | None = control_pb2.ModelInfo(vocab_size=vocab_size)
        self.is_closed = False
        self._answer = answer
        self._delay_s = delay_s

    def open(
        self, request: AnyRequest, *, attempt: int, timeout_s: float | None, prompt_cost: int, cost: int
    ) -> FakeCanaryTarget:
        self.request = request
        return self

    def close(self) -> None:
        self.is_closed = True

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        for part in self._answer:
            await asyncio.sleep(self._delay_s)
            if isinstance(part, Exception):
                raise part
            yield pb.GenerateResponse(choices=[pb.Choice(token_ids=part)])


async def test_a_replica_that_generates_passes_its_canary() -> None:
    target = FakeCanaryTarget([1], [2])
    await run_canary(target, timeout_s=1)
    assert target.is_closed
    assert target.request == canary_request(100)


@pytest.mark.parametrize(
    "target",
    [
        FakeCanaryTarget([1]),
        FakeCanaryTarget(),
        FakeCanaryTarget([1, 2, 3]),
        FakeCanaryTarget([1, 100]),
        FakeCanaryTarget([1], RemoteError(13, "NaN")),
        FakeCanaryTarget(ReplicaLost("replica")),
        FakeCanaryTarget([1], [2], delay_s=5),
    ],
    ids=["short", "empty", "long", "out of vocabulary", "error", "lost", "slow"],
)
async def test_a_replica_that_answers_wrongly_or_late_fails_its_canary(target: FakeCanaryTarget) -> None:
    with pytest.raises(CanaryFailed, match="replica replica failed its canary"):
        await run_canary(target, timeout_s=0.05)
    assert target.is_closed


async def test_a_replica_that_is_not_attached_fails_its_canary() -> None:
    target = FakeCanaryTarget()
    target.model = None
    with pytest.raises(CanaryFailed, match="not attached"):
        await run_canary(target, timeout_s=1)


def test_the_canary_is_short_greedy_and_within_any_vocabulary() -> None:
    request = canary_request(3)
    assert max(request.token_ids.ids) < 3
    assert (request.sampling.max_tokens, request.sampling.temperature) == (NUM_TOKENS, 0)


def test_a_deadline_that_passed_is_an_error_and_none_is_none() -> None:
    assert Answering(None).time_left_s() is None
    left_s = Answering(10.0).time_left_s()
    assert left_s is not None
    assert 9 < left_s <= 10
    with pytest.raises(DeadlineExceeded):
        Answering(-1.0).check()


async def test_what_ends_a_request_also_ends_its_stream() -> None:
    answering, stream = Answering(None), open_stream(FakeLink())
    answering.placed(stream)
    answering.fail(RequestAborted())
    with pytest.raises(RequestAborted):
        answering.check()
    with pytest.raises(RequestAborted):
        await anext(stream)


def test_only_the_last_piece_gets_the_routers_times() -> None:
    answering = Answering(None)
    assert not answering.stamp(pb.GenerateResponse()).HasField("timings")
    last = answering.stamp(pb.GenerateResponse(timings=pb.Timings(queue_ms=1)))
    assert answering.has_started
    assert last.timings.queue_ms == 1
    assert last.timings.total_ms >= last.timings.router_ms >= 0


def test_a_stream_with_a_gap_is_broken_and_one_that_a_client_cut_is_not() -> None:
    gap, cut = open_stream(FakeLink()), open_stream(FakeLink(), limit=1)
    gap.push(piece(1, 1))
    for sequence in range(3):
        cut.push(piece(sequence, 1))
    assert (gap.is_broken, cut.is_broken) == (True, False)


def test_what_a_process_starts_with_is_not_looked_at_by_later_collections() -> None:
    before = gc.get_freeze_count()
    try:
        settle_heap()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_while_a_process_starts_nothing_is_collected_and_what_it_made_stays() -> None:
    before = gc.get_freeze_count()
    try:
        with growing_heap():
            assert not gc.isenabled()
            made: list[object] = []
            made.append(made)
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        with pytest.raises(OSError, match="taken"), growing_heap():
            raise OSError("taken")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
