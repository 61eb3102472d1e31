"""Answering one request, on as many replicas as it takes."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection

import grpc

from cluster.codec import AnyRequest
from cluster.config import RouterConfig
from cluster.errors import (
    AnswerInterrupted,
    NoReplicaAvailable,
    PoisonedRequest,
    RemoteError,
    ReplicaLost,
    ReplicaUnresponsive,
    ReplicaUnsound,
)
from cluster.metrics.router import RouterMetrics
from cluster.retry_budget import RetryBudget
from cluster.router.answering import Answering
from cluster.router.crashes import Crashes
from cluster.router.link import Link
from cluster.router.loss import Verdict
from cluster.router.placement import Placement, cost_of
from cluster.router.quarantine import Quarantine
from cluster.router.stream import LinkStream
from cluster.router.trials import TRIAL_OVERHEAD_S, Trials
from protos import generation_pb2

UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
RESOURCE_EXHAUSTED: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
MAX_STALLED_TRIALS = 2
"""A step that does not end although it computes one request alone may be the machine's fault, but hardly twice."""
FULL_PAUSE_S = 0.2
"""Before a replica whose queue is full is asked again for a request that was taken on already."""

MIN_TRIAL_TOKENS = 2
ALL_TRIALS_S = 0.5
"""What the trials after one loss may take together: a client waits that long at most for its next token."""
UNKNOWN_STEP_S = 0.005
FEW_STREAMS = 2
"""On a replica whose predecessors kept ending, while others have room."""
YOUNG_S = 1.0
"""Most requests that end replicas do it within this."""

log = logging.getLogger(__name__)


class Resuming:
    """Places a request, and places it again after what its client has whenever its replica is lost or gives it up.

    A replica that leaves in order hands its requests over, as often as it happens. A loss counts: `resume_budget` of
    them are made good. Requests that may have caused one are tried alone before they run among others again.
    """

    def __init__(
        self,
        config: RouterConfig,
        placement: Placement,
        *,
        quarantine: Quarantine,
        metrics: RouterMetrics,
        on_explained: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """`on_explained` is told the incarnations that a request was found to have ended."""
        self._config = config
        self._placement = placement
        self._quarantine = quarantine
        self._metrics = metrics
        self._budget = RetryBudget()
        self._trials = Trials(
            placement.note_change, lambda: placement.num_ready, lambda: placement.step_s or UNKNOWN_STEP_S
        )
        self._crashes = Crashes()
        self._on_explained = on_explained

    async def answer(
        self, request: AnyRequest, answering: Answering
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The pieces of the answer. Raises AnswerInterrupted, PoisonedRequest or what a replica ended it with."""
        self._budget.request()
        while not answering.delivered.is_complete:
            link = await self._choose(request, answering)
            self._quarantine.check(request)  # another router may have found it guilty meanwhile
            stream = self._place(link, request, answering)
            try:
                async for piece in stream:
                    if not answering.has_started:
                        self._note_start(answering)
                    yield answering.stamp(piece)
                return
            except RemoteError as error:
                self._trials.end(link, stream)
                await self._note_refusal(error, request, link, answering)
            except ReplicaLost as error:
                if not isinstance(error, ReplicaUnresponsive | ReplicaUnsound):
                    self._crashes.note(link.incarnation)
                    answering.note_crash(link.incarnation, link.vitals.place)
                self._note_loss(stream.verdict, link, request, answering)
                share_s = ALL_TRIALS_S * self._trials.num_places * stream.trial_share
                answering.trial_tokens = trial_tokens(
                    stream.unheard_s,
                    link.load.step_ms / 1000,
                    share_s,
                    age_s=stream.age_s,
                    num_delivered=stream.delivered,
                )
            finally:
                stream.close()
                self._trials.end(link, stream)

    async def _choose(self, request: AnyRequest, answering: Answering) -> Link:
        try:
            if answering.is_suspect:
                with self._trials.waiting():
                    return await self._placement.choose(request, answering, self._may_try)
            return await self._placement.choose(request, answering, is_held=self._is_held)
        except NoReplicaAvailable as error:
            if answering.num_losses == 0:
                raise
            raise AnswerInterrupted(answering.num_losses, answering.delivered.num_tokens) from error

    def _may_try(self, link: Link) -> bool:
        """Whether a crash there would say something of the request, or there is nowhere better."""
        return self._trials.may_begin(link) and not (link.vitals.is_failing and self._placement.has_sounder(link))

    def _is_held(self, link: Link) -> bool:
        """Whether others had better take the request while they have room."""
        return self._trials.is_under_way(link) or (link.vitals.is_failing and link.num_streams >= FEW_STREAMS)

    def _place(self, link: Link, request: AnyRequest, answering: Answering) -> LinkStream:
        prompt_cost, answer_cost = cost_of(request, link, answering)
        submit = answering.submit()
        if answering.trace is not None:
            submit.trace_parent = answering.trace.place(link.name, answering.num_placements)
        stream = link.open(
            request,
            attempt=answering.num_placements,
            timeout_s=answering.time_left_s(),
            prompt_cost=prompt_cost,
            cost=prompt_cost + answer_cost,
            submit=submit,
        )
        answering.placed(stream)
        if answering.is_suspect:
            self._trials.begin(link, stream)
            stream.on_trial_passed = lambda: self._note_passed(link, stream, answering)
        self._metrics.placed(
            answering.num_placements, is_resumed=bool(submit.next_sequence), is_trial=answering.is_suspect
        )
        return stream

    def _note_start(self, answering: Answering) -> None:
        self._metrics.started(placed_after_s=answering.placed_after_s, first_token_s=answering.elapsed_s)

    def _note_passed(self, link: Link, stream: LinkStream, answering: Answering) -> None:
        answering.clear()
        self._trials.end(link, stream)

    async def _note_refusal(self, error: RemoteError, request: AnyRequest, link: Link, answering: Answering) -> None:
        """The replica is alive and ended the request itself: raises `error` unless it is worth another placement.

        One that is full is no reason to refuse a request while others may not be, as long as few are tried again.
        """
        if error.code == UNAVAILABLE:
            answering.refused.add(link.incarnation)
            answering.is_taken_on = True
        elif error.code != RESOURCE_EXHAUSTED or error.retry_after_ms < 0:
            raise error
        elif answering.is_taken_on:
            await self._placement.wait(max(FULL_PAUSE_S, error.retry_after_ms / 1000), answering)
        elif self._placement.has_other(request, link, answering) and self._budget.try_again():
            answering.refused.add(link.incarnation)
        else:
            raise error

    def _note_loss(self, verdict: Verdict, link: Link, request: AnyRequest, answering: Answering) -> None:
        """Raises what ends the request, if this loss does."""
        answering.num_losses += 1
        answering.is_taken_on = True
        if verdict is Verdict.STALLED_ALONE:
            answering.num_stalled_trials += 1
        answering.num_lost_trials += verdict is Verdict.GUILTY
        if self._is_poison(answering) or answering.num_stalled_trials >= MAX_STALLED_TRIALS:
            ended = {*answering.crashed_on, link.incarnation}
            self._crashes.explain(ended)
            self._on_explained(ended)
            log.error("request %.64r ended a replica alone and is quarantined", request.request_id)
            self._quarantine.add(request)
            self._metrics.poisoned()
            raise PoisonedRequest
        answering.is_suspect = answering.is_suspect or verdict is not Verdict.INNOCENT
        if answering.num_losses > self._config.resume_budget and not answering.delivered.is_complete:
            raise AnswerInterrupted(answering.num_losses, answering.delivered.num_tokens)

    def _is_poison(self, answering: Answering) -> bool:
        """Whether a replica that crashed under this request alone is proof enough.

        While others crash without it, it takes one more: the next may have been as much of a coincidence. So it does where
        the one before was lost in the same place: the GPU may be to blame for both.
        """
        is_doubtful = answering.crashed_twice_in_one or self._crashes.num_others(answering.crashed_on) > 0
        num_needed = 2 if is_doubtful else 1
        return answering.num_lost_trials >= num_needed


def trial_tokens(
    unheard_s: float, step_s: float, share_s: float, *, age_s: float = math.inf, num_delivered: int = 0
) -> int:
    """Tokens that a trial has to bring to get as far as the lost replica may have been, within `share_s`.

    Tokens are sent in batches, so it was ahead of what arrived by all the steps since the last message, and the step
    that ended it is one of them. Of a request that was placed `age_s` ago, not long, all the steps since then count
    that brought none of its `num_delivered` tokens: its messages may have been lost with the connection. Failure mode:
    with so many suspects that their trials would take too long, those of the older ones are cut short, and a request
    that ends replicas late in its answer may pass.
    """
    step_s = step_s or UNKNOWN_STEP_S
    if age_s <= YOUNG_S:
        unheard_s = max(unheard_s, age_s - num_delivered * step_s)
    wanted = MIN_TRIAL_TOKENS + math.ceil(unheard_s / step_s)
    allowed = int((share_s - TRIAL_OVERHEAD_S) / step_s)
    return max(min(wanted, allowed), MIN_TRIAL_TOKENS)
