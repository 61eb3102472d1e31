"""One request that lives in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.answers import extend_choice, timings_to_proto
from cluster.delivered import Delivered
from cluster.metrics.answer_times import AnswerTimes
from protos import generation_pb2
from worker.request import ChoiceDelta, EngineEvent, Phase, RequestFailed, RequestPhase, Timings

NOTHING = Delivered()


class Outbox(Protocol):
    """Whoever sends the pieces of answers on."""

    def touch(self, live: LiveRequest) -> None:
        """This request has something new."""

    def settle(self) -> None:
        """All that a step brought is in: decide what to send when."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who answers, for the how many-th time, on which stream of its outbox, and what came of earlier attempts."""

    replica: str
    attempt: int = 1
    stream_id: int = 0
    delivered: Delivered = NOTHING
    trial_tokens: int = 0
    """0 = it is no suspect."""
    is_moved: bool = False
    """Whether it was under way on another replica just before."""


class LiveRequest:
    """Gathers what steps bring to one request until its outbox takes it: several steps then cost one message."""

    __slots__ = (
        "_cached_tokens",
        "_choices",
        "_completion_tokens",
        "_is_closed",
        "_last",
        "_num_open",
        "_pending",
        "_phases",
        "_prompt_tokens",
        "_sequence",
        "engine_id",
        "error",
        "is_urgent",
        "origin",
        "outbox",
        "pending_bytes",
        "request_id",
        "times",
        "trace_parent",
    )

    def __init__(
        self,
        *,
        request_id: str,
        engine_id: str,
        num_choices: int,
        num_prompt: int = 0,
        origin: Origin,
        outbox: Outbox,
        times: AnswerTimes | None = None,
    ) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.origin = origin
        self.outbox = outbox
        self.times = times or AnswerTimes()
        self.trace_parent = ""
        """The span its stages belong to."""
        self.error: Exception | None = None
        self.is_urgent = False
        """A first token, the end of a choice or an error is waiting to be sent."""
        self.pending_bytes = 0
        """About what the waiting piece takes on the wire."""
        self._num_open = num_choices - len(origin.delivered.finished)
        self._is_closed = False
        self._phases: list[RequestPhase] = []
        self._pending = generation_pb2.GenerateResponse()
        self._choices: dict[int, generation_pb2.Choice] = {}
        self._last: ChoiceDelta | None = None
        self._sequence = origin.delivered.next_sequence
        self._prompt_tokens = num_prompt
        self._cached_tokens = 0
        self._completion_tokens = origin.delivered.num_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of the whole answer so far, with those delivered before."""
        return self._completion_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the engine brings nothing more."""
        return self.error is not None or self._num_open == 0

    @property
    def timings(self) -> Timings | None:
        """The engine's times of a complete answer."""
        return self._last.timings if self._last is not None and self._num_open == 0 else None

    def add(self, event: EngineEvent) -> None:
        """Take what a step brought."""
        if isinstance(event, RequestFailed):
            self.fail(event.error)
        elif isinstance(event, RequestPhase):
            self._enter(event)
        elif not self.has_ended:
            self._extend(event)

    def fail(self, error: Exception) -> None:
        """End with an error, unless the answer is complete."""
        if not self.has_ended:
            self.error = error
            self.is_urgent = True

    def take(self) -> generation_pb2.GenerateResponse | None:
        """The piece that is due, if there is one; the last piece carries the sums."""
        piece = self._pending
        is_last = self._num_open == 0 and not self._is_closed
        if not self._choices and not is_last:
            return None
        piece.request_id = self.request_id
        piece.sequence = self._sequence
        if self._sequence == 0:
            piece.usage.prompt_tokens = self._prompt_tokens
            piece.usage.cached_tokens = self._cached_tokens
        if is_last:
            self._close(piece)
        self._sequence += 1
        self._pending = generation_pb2.GenerateResponse()
        self._choices = {}
        self.pending_bytes = 0
        self.is_urgent = self.error is not None
        return piece

    def take_phases(self) -> list[RequestPhase]:
        """The phases that were entered since the last time."""
        phases, self._phases = self._phases, []
        return phases

    def _enter(self, phase: RequestPhase) -> None:
        if phase.phase is not Phase.SCHEDULED:
            self.is_urgent = True
        if not self.has_ended:
            self._phases.append(phase)

    def _extend(self, delta: ChoiceDelta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = self._pending.choices.add(index=delta.index)
        extend_choice(choice, delta)
        self.pending_bytes += _wire_bytes(delta)
        self._completion_tokens += len(delta.token_ids)
        if self._last is None:
            self._prompt_tokens, self._cached_tokens = delta.prompt_tokens, delta.cached_tokens
            self.is_urgent = True
        self._last = delta
        if delta.finish_reason is not None:
            self._num_open -= 1
            self.is_urgent = True

    def _close(self, piece: generation_pb2.GenerateResponse) -> None:
        last = self._last
        self._is_closed = True
        piece.usage.prompt_tokens = self._prompt_tokens
        piece.usage.cached_tokens = self._cached_tokens
        piece.usage.completion_tokens = self._completion_tokens
        piece.execution.replica = self.origin.replica
        piece.execution.attempts = self.origin.attempt
        piece.timings.SetInParent()
        if last is None:
            return
        if last.timings is not None:
            piece.timings.CopyFrom(timings_to_proto(last.timings))
        piece.execution.tier = last.tier
        piece.execution.bucket = last.bucket
        piece.execution.runner = last.runner


def _wire_bytes(delta: ChoiceDelta) -> int:
    """Close enough to keep messages and queues bounded."""
    logprobs = sum(12 + 12 * len(logprob.top) for logprob in delta.logprobs)
    return 16 + 5 * len(delta.token_ids) + 4 * len(delta.text) + logprobs
