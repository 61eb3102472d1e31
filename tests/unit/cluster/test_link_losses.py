"""What a link makes of a replica's last frames."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import RouterConfig
from cluster.errors import RemoteError, ReplicaLost, ReplicaUnresponsive, ReplicaUnsound
from cluster.router.link import Link
from cluster.router.loss import Verdict
from cluster.router.quarantine import fingerprint
from cluster.router.stream import LinkStream
from protos import control_pb2, replica_pb2
from protos import generation_pb2 as pb

DEAD = replica_pb2.StreamError(code=14, message="the engine of the replica stopped")


class FakeConnection:
    """Keeps what is sent."""

    is_closing = False

    def __init__(self) -> None:
        self.is_silent = False
        self.sent: list[replica_pb2.RouterFrame] = []

    def send(self, frame: replica_pb2.RouterFrame) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        """Nothing is open."""


class Attached:
    """A link to a replica with `max_rows` rows, and the streams it carries."""

    def __init__(self, *, max_rows: int = 8) -> None:
        self.num_fenced = 0

        async def probe(_: Link) -> None:
            """No canary comes back."""

        self.link = Link(
            "127.0.0.1:1",
            RouterConfig(),
            router="router",
            probe=probe,
            on_change=lambda: None,
            on_fenced=self._note_fenced,
        )
        self.connection = FakeConnection()
        untyped: Any = self.connection
        self.link._connection = untyped
        self.receive(
            hello=replica_pb2.ReplicaHello(replica="r", incarnation="1", model=control_pb2.ModelInfo(name="m")),
            load=control_pb2.Load(max_rows=max_rows),
        )

    def open(self) -> LinkStream:
        return self.link.open(pb.GenerateRequest(), attempt=1, timeout_s=None, prompt_cost=1, cost=5)

    def receive(self, **parts: Any) -> None:
        self.link._receive(replica_pb2.ReplicaFrame(**parts))

    def tell(self, stream: LinkStream, phase: str) -> None:
        value = replica_pb2.StreamPhase.Value(f"STREAM_PHASE_{phase}")
        self.receive(events=[replica_pb2.StreamEvent(stream_id=stream.stream_id, phase=value)])

    def dies(self) -> None:
        untyped: Any = self.connection
        self.link._lose(untyped)

    def _note_fenced(self) -> None:
        self.num_fenced += 1


def goodbye(*streams: LinkStream) -> list[replica_pb2.StreamEvent]:
    return [replica_pb2.StreamEvent(stream_id=stream.stream_id, error=DEAD, end=True) for stream in streams]


async def ended_with(stream: LinkStream) -> Exception:
    with pytest.raises((ReplicaLost, RemoteError)) as caught:
        await anext(stream)
    return caught.value


async def test_a_death_makes_suspects_of_what_was_scheduled_or_may_have_been() -> None:
    attached = Attached(max_rows=3)
    streams = [attached.open() for _ in range(5)]
    for stream in streams[:2]:
        attached.tell(stream, "SCHEDULED")
    attached.dies()
    assert [stream.verdict for stream in streams] == [Verdict.SUSPECT] * 3 + [Verdict.INNOCENT] * 2
    assert streams[2].trial_share > streams[1].trial_share > streams[0].trial_share > streams[4].trial_share == 0
    assert isinstance(await ended_with(streams[0]), ReplicaLost)


async def test_a_death_under_a_trial_proves_it_and_clears_the_others() -> None:
    attached = Attached()
    streams = [attached.open() for _ in range(3)]
    attached.tell(streams[0], "SCHEDULED")
    attached.tell(streams[2], "TRIAL_BEGAN")
    attached.dies()
    assert [stream.verdict for stream in streams] == [Verdict.INNOCENT, Verdict.INNOCENT, Verdict.GUILTY]


async def test_a_trial_that_has_passed_is_one_of_all() -> None:
    attached = Attached()
    streams = [attached.open() for _ in range(2)]
    for phase in ("TRIAL_BEGAN", "TRIAL_PASSED"):
        attached.tell(streams[1], phase)
    attached.dies()
    assert [stream.verdict for stream in streams] == [Verdict.SUSPECT] * 2


async def test_beginning_and_end_of_a_trial_are_noted_to_the_replica_and_nothing_else_is() -> None:
    attached = Attached()
    stream = attached.open()
    attached.connection.sent.clear()
    for phase in ("SCHEDULED", "TRIAL_BEGAN", "TRIAL_PASSED"):
        attached.tell(stream, phase)
    assert [frame.trial_noted.stream_id for frame in attached.connection.sent] == [stream.stream_id] * 2


@pytest.mark.parametrize(("step_age_s", "kind"), [(0.0, ReplicaLost), (2.5, ReplicaUnresponsive)])
async def test_the_last_words_of_a_failed_replica_lose_all_its_streams_together(
    step_age_s: float, kind: type[ReplicaLost]
) -> None:
    attached = Attached()
    streams = [attached.open() for _ in range(3)]
    attached.receive(load=control_pb2.Load(max_rows=8, step_age_s=step_age_s))
    attached.tell(streams[1], "TRIAL_BEGAN")
    attached.receive(state=control_pb2.REPLICA_STATE_FAILED, events=goodbye(*streams))
    verdict = Verdict.GUILTY if kind is ReplicaLost else Verdict.STALLED_ALONE
    assert [stream.verdict for stream in streams] == [Verdict.INNOCENT, verdict, Verdict.INNOCENT]
    assert [type(await ended_with(stream)) for stream in streams] == [kind] * 3
    attached.receive(events=goodbye(*streams))
    assert attached.num_fenced == 3


async def test_nobody_is_suspected_when_a_replica_found_its_memory_changed() -> None:
    attached = Attached()
    streams = [attached.open() for _ in range(3)]
    for stream, phase in zip(streams, ("SCHEDULED", "TRIAL_BEGAN"), strict=False):
        attached.tell(stream, phase)
    events = goodbye(*streams)
    for event in events:
        event.error.code = 15
    attached.receive(state=control_pb2.REPLICA_STATE_FAILED, events=events)
    assert [stream.verdict for stream in streams] == [Verdict.INNOCENT] * 3
    assert [type(await ended_with(stream)) for stream in streams] == [ReplicaUnsound] * 3


async def test_what_a_draining_replica_ends_is_its_own_word() -> None:
    attached = Attached()
    stream = attached.open()
    attached.receive(state=control_pb2.REPLICA_STATE_DRAINING, events=goodbye(stream))
    assert isinstance(await ended_with(stream), RemoteError)
    assert stream.verdict is Verdict.INNOCENT


async def test_late_events_of_a_stream_that_was_given_up_reach_nobody() -> None:
    attached = Attached()
    first, second = attached.open(), attached.open()
    first.close()
    late = pb.GenerateResponse(choices=[pb.Choice(token_ids=[1])])
    attached.receive(events=[replica_pb2.StreamEvent(stream_id=first.stream_id, response=late)])
    attached.receive(events=[replica_pb2.StreamEvent(stream_id=second.stream_id, response=late, end=True)])
    assert attached.num_fenced == 1
    assert [piece.choices[0].token_ids[0] async for piece in second] == [1]


def test_a_replica_hears_of_every_verdict_when_it_greets_and_brings_those_of_others() -> None:
    attached = Attached()
    guilty = pb.GenerateRequest(text="x")
    attached.link._quarantine.add(guilty)
    hello = replica_pb2.ReplicaHello(replica="r", incarnation="1", model=control_pb2.ModelInfo(name="m"))
    attached.receive(hello=hello)
    (frame,) = attached.connection.sent
    assert frame.poison.fingerprint == fingerprint(guilty)
    assert 599 < frame.poison.ttl_s <= 600
    attached.receive(poisons=[replica_pb2.PoisonVerdict(fingerprint=bytes(16), ttl_s=5.0)])
    assert bytes(16) in attached.link._quarantine.verdicts
    assert len(attached.connection.sent) == 1, "the replica tells its other routers itself"


def test_how_many_routers_there_are_comes_with_the_load_and_goes_with_the_connection() -> None:
    attached = Attached()
    attached.receive(load=control_pb2.Load(max_rows=8), num_routers=3)
    attached.receive(state=control_pb2.REPLICA_STATE_DRAINING)
    assert attached.link.num_routers == 3
    attached.dies()
    assert attached.link.num_routers == 0
    attached.link.tell({bytes(16): 1.0})


@pytest.mark.parametrize(("state", "has_left"), [("READY", False), ("DRAINING", True), ("STOPPED", True)])
async def test_a_replica_that_left_on_purpose_is_not_dialed_again_and_again(state: str, has_left: bool) -> None:
    attached = Attached()
    attached.receive(state=control_pb2.ReplicaState.Value(f"REPLICA_STATE_{state}"))
    attached.dies()
    assert attached.link._has_left is has_left
    attached.link._readmission.cancel()


@pytest.mark.parametrize(
    ("code", "step_age_s", "why"), [(15, 0.0, "weights"), (14, 0.0, "crashed"), (14, 5.0, "did not end"), (0, 0.0, "")]
)
def test_a_process_that_ends_is_held_against_its_gpu_with_its_reason(code: int, step_age_s: float, why: str) -> None:
    attached = Attached()
    vitals = attached.link.vitals
    assert vitals.place == "r"
    hello = replica_pb2.ReplicaHello(replica="r", incarnation="2", gpu="GPU-1", model=control_pb2.ModelInfo(name="m"))
    attached.receive(hello=hello, load=control_pb2.Load(step_age_s=step_age_s))
    if code:
        attached.receive(state=control_pb2.REPLICA_STATE_FAILED, failed_with=code)
    else:
        attached.connection.is_silent = True  # it may live
    attached.dies()
    assert vitals.place == "GPU-1"
    assert (vitals.num_ends, why in vitals.last_end) == (int(bool(code)), True)
    attached.receive(hello=hello)
    assert vitals.num_ends == 0, "the same process is back: only the connection had broken"
