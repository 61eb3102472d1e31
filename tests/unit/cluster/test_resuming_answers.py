"""One request over several replicas, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.config import RouterConfig
from cluster.errors import AnswerInterrupted, NoReplicaAvailable, PoisonedRequest, RemoteError
from cluster.metrics.router import RouterMetrics
from cluster.router.answering import Answering
from cluster.router.loss import LossKind, Verdict
from cluster.router.quarantine import Quarantine
from cluster.router.resuming import Resuming
from cluster.router.stream import LinkStream
from protos import control_pb2, replica_pb2
from protos import generation_pb2 as pb
from tests.fakes.fake_link import FakeLink

UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
RESOURCE_EXHAUSTED: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]

Act = Callable[[LinkStream, replica_pb2.Submit], None]
"""What a replica does with a request it is given."""


class ScriptLink(FakeLink):
    """A replica that does one thing with each request."""

    def __init__(self, name: str, act: Act) -> None:
        super().__init__(incarnation=name)
        self.name = name
        self.act = act
        self.model = control_pb2.ModelInfo(name="m", max_model_len=100)
        self.load = control_pb2.Load(step_ms=2.0)
        self.submits: list[replica_pb2.Submit] = []

    def open(self, request: Any, *, submit: replica_pb2.Submit, cost: int, prompt_cost: int, **_: Any) -> LinkStream:
        untyped: Any = self
        self.outstanding_tokens += cost
        self.submits.append(submit)
        stream = LinkStream(
            untyped, 1, prompt_cost=prompt_cost, cost=cost, limit=100, next_sequence=submit.next_sequence
        )
        self.act(stream, submit)
        return stream


class ScriptPlacement:
    """Gives out replicas in order, however often they were refused."""

    num_ready = 1
    step_s = 0.01

    def __init__(self, links: Sequence[ScriptLink], *, others: bool = False) -> None:
        self._links = iter(links)
        self.waits: list[float] = []
        self.refused: list[set[str]] = []
        self._has_other = others

    def note_change(self) -> None:
        """Nobody waits."""

    async def choose(
        self,
        request: Any,
        answering: Answering,
        fits: Callable[[Any], bool] = lambda _: True,
        *,
        is_held: Callable[[Any], bool] = lambda _: False,
    ) -> Any:
        self.refused.append(set(answering.refused))
        link = next(self._links, None)
        if link is None:
            raise NoReplicaAvailable(1.0)
        assert fits(link)
        assert not is_held(link)
        return link

    def has_other(self, request: Any, link: Any, answering: Answering) -> bool:
        return self._has_other

    async def wait(self, limit_s: float, answering: Answering) -> None:
        self.waits.append(limit_s)


def piece(sequence: int, *token_ids: int, is_last: bool = False) -> replica_pb2.StreamEvent:
    response = pb.GenerateResponse(sequence=sequence, choices=[pb.Choice(token_ids=token_ids)])
    if is_last:
        response.choices[0].finish_reason = pb.FINISH_REASON_LENGTH
        response.timings.SetInParent()
    return replica_pb2.StreamEvent(stream_id=1, response=response, end=is_last)


def brings(*token_ids: int, then: Act | None = None) -> Act:
    """A token a message, from wherever the answer is; the last one ends it unless something else happens `then`."""

    def act(stream: LinkStream, submit: replica_pb2.Submit) -> None:
        for place, token_id in enumerate(token_ids):
            is_last = then is None and place == len(token_ids) - 1
            stream.push(piece(submit.next_sequence + place, token_id, is_last=is_last))
        if then is not None:
            then(stream, submit)

    return act


def loses(verdict: Verdict, kind: LossKind = LossKind.CRASHED) -> Act:
    return lambda stream, _: stream.lose(kind, verdict, 1.0)


def refuses(code: int, retry_after_ms: int = 0) -> Act:
    error = replica_pb2.StreamError(code=code, message="no", retry_after_ms=retry_after_ms)
    return lambda stream, _: stream.push(replica_pb2.StreamEvent(stream_id=1, error=error, end=True))


def request(text: str = "x") -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", text=text, sampling=pb.SamplingParams(max_tokens=8))


class Run:
    """An answer, and what was made of the replicas on the way."""

    def __init__(
        self,
        *acts: Act,
        config: RouterConfig | None = None,
        others: bool = False,
        on_explained: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.links = [ScriptLink(f"r{place}", act) for place, act in enumerate(acts)]
        untyped: Any = ScriptPlacement(self.links, others=others)
        self.placement = untyped
        self.quarantine = Quarantine(60.0)
        self.answering = Answering(None)
        self._resuming = Resuming(
            config or RouterConfig(),
            untyped,
            quarantine=self.quarantine,
            metrics=RouterMetrics(),
            on_explained=on_explained,
        )

    async def tokens(self, text: str = "x") -> list[int]:
        self.answering = Answering(None)
        pieces = [one async for one in self._resuming.answer(request(text), self.answering)]
        assert [one.sequence for one in pieces] == list(range(len(pieces)))
        assert all(link.outstanding_tokens == 0 for link in self.links)
        return [token for one in pieces for token in one.choices[0].token_ids]

    def submit(self, place: int) -> replica_pb2.Submit:
        (submit,) = self.links[place].submits
        return submit


async def test_each_attempt_gets_what_all_before_it_brought() -> None:
    run = Run(
        brings(1, 2, then=loses(Verdict.INNOCENT, LossKind.SILENT)),
        brings(3, then=loses(Verdict.INNOCENT)),
        brings(4, 5),
    )
    assert await run.tokens() == [1, 2, 3, 4, 5]
    assert [list(one.token_ids) for place in (1, 2) for one in run.submit(place).delivered] == [[1, 2], [1, 2, 3]]
    assert [run.submit(place).next_sequence for place in range(3)] == [0, 2, 3]
    assert not any(run.submit(place).is_trial for place in range(3))
    assert [run.submit(place).is_moved for place in range(3)] == [False, True, True]
    assert run.answering.num_placements == 3


def later(act: Act) -> Act:
    """What the replica sends arrives after the placement."""

    def act_later(stream: LinkStream, submit: replica_pb2.Submit) -> None:
        asyncio.get_running_loop().call_soon(act, stream, submit)

    return act_later


def passes(then: Act) -> Act:
    def act(stream: LinkStream, submit: replica_pb2.Submit) -> None:
        stream.push(replica_pb2.StreamEvent(stream_id=1, phase=replica_pb2.STREAM_PHASE_TRIAL_PASSED))
        then(stream, submit)

    return act


@pytest.mark.parametrize("has_passed", [False, True])
async def test_a_suspect_is_tried_until_it_has_passed(has_passed: bool) -> None:
    second = brings(2, then=loses(Verdict.INNOCENT))
    run = Run(brings(1, then=loses(Verdict.SUSPECT)), later(passes(second) if has_passed else second), brings(3))
    assert await run.tokens() == [1, 2, 3]
    assert [run.submit(place).is_trial for place in range(3)] == [False, True, not has_passed]
    assert run.submit(1).trial_tokens >= 2


async def test_the_guilty_ends_poisoned_and_is_quarantined() -> None:
    run = Run(brings(1, then=loses(Verdict.SUSPECT)), loses(Verdict.GUILTY), brings(2))
    with pytest.raises(PoisonedRequest):
        await run.tokens()
    assert not run.links[2].submits
    with pytest.raises(PoisonedRequest):
        run.quarantine.check(request())


async def test_a_second_guilty_request_soon_after_the_first_takes_no_more_replicas_than_that() -> None:
    explained: list[set[str]] = []
    suspect, guilty = loses(Verdict.SUSPECT), loses(Verdict.GUILTY)
    run = Run(suspect, guilty, suspect, guilty, brings(1), on_explained=explained.append)
    for text in ("x", "y"):
        with pytest.raises(PoisonedRequest):
            await run.tokens(text)
    assert not run.links[4].submits
    assert explained == [{"r0", "r1"}, {"r2", "r3"}]


async def test_two_crashes_in_one_place_prove_nothing_and_a_third_does() -> None:
    def run(*acts: Act) -> Run:
        made = Run(loses(Verdict.SUSPECT), loses(Verdict.GUILTY), *acts)
        for link in made.links[:2]:
            link.vitals.note_place("GPU-1", link.incarnation)
        return made

    assert await run(brings(1, 2)).tokens() == [1, 2]
    with pytest.raises(PoisonedRequest):
        await run(loses(Verdict.GUILTY), brings(1)).tokens()


async def test_one_stall_alone_may_be_the_machines_and_two_are_the_requests() -> None:
    alone = loses(Verdict.STALLED_ALONE, LossKind.STALLED)
    assert await Run(loses(Verdict.SUSPECT, LossKind.STALLED), alone, brings(1, 2)).tokens() == [1, 2]
    run = Run(loses(Verdict.SUSPECT, LossKind.STALLED), alone, alone, brings(1, 2))
    with pytest.raises(PoisonedRequest):
        await run.tokens()
    assert len(run.quarantine) == 1


@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_the_budget_counts_losses(budget: int) -> None:
    lost = brings(7, then=loses(Verdict.INNOCENT))
    config = replace(RouterConfig(), resume_budget=budget)
    assert len(await Run(*[lost] * budget, brings(8), config=config).tokens()) == budget + 1
    run = Run(*[lost] * (budget + 1), brings(8), config=config)
    with pytest.raises(AnswerInterrupted) as caught:
        await run.tokens()
    assert (caught.value.num_losses, caught.value.num_tokens) == (budget + 1, budget + 1)


async def test_handing_over_costs_nothing_and_does_not_go_back() -> None:
    gives_up = brings(7, then=refuses(UNAVAILABLE))
    run = Run(*[gives_up] * 9, brings(8), config=replace(RouterConfig(), resume_budget=0))
    assert await run.tokens() == [7] * 9 + [8]
    assert run.placement.refused[-1] == {f"r{place}" for place in range(9)}
    assert run.answering.num_losses == 0


async def test_an_answer_that_was_taken_on_waits_for_a_full_replica_and_a_new_one_does_not() -> None:
    run = Run(brings(1, then=loses(Verdict.INNOCENT)), refuses(RESOURCE_EXHAUSTED, 700), brings(2))
    assert await run.tokens() == [1, 2]
    assert run.placement.waits == [0.7]
    with pytest.raises(RemoteError):
        await Run(refuses(RESOURCE_EXHAUSTED, 700), brings(2)).tokens()


@pytest.mark.parametrize("code", [INTERNAL, grpc.StatusCode.INVALID_ARGUMENT.value[0]])
async def test_what_a_replica_judges_is_final(code: int) -> None:
    run = Run(brings(1, then=refuses(code)), brings(2))
    with pytest.raises(RemoteError):
        await run.tokens()
    assert not run.links[1].submits


async def test_without_a_replica_an_answer_breaks_off_after_a_loss_and_a_new_request_finds_none() -> None:
    with pytest.raises(AnswerInterrupted, match="1 replica was lost"):
        await Run(brings(1, then=loses(Verdict.INNOCENT))).tokens()
    with pytest.raises(NoReplicaAvailable):
        await Run().tokens()


async def test_a_replica_that_dies_after_the_last_message_took_nothing_along() -> None:
    def ends_and_dies(stream: LinkStream, submit: replica_pb2.Submit) -> None:
        last = piece(submit.next_sequence, 9, is_last=True)
        last.end = False
        stream.push(last)
        stream.lose(LossKind.CRASHED, Verdict.SUSPECT, 1.0)

    run = Run(ends_and_dies)
    assert await run.tokens() == [9]
