"""What calls return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import control_pb2, generation_pb2
from worker.request import FinishReason

_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability, and the likeliest tokens at its place as (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers; in a stream, what was added to it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """None while it goes on."""
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer; in a stream, the next piece of it. Sums and times come with the last piece."""

    request_id: str
    choices: tuple[Choice, ...]
    sequence: int
    """Of the piece in its stream: 0, 1, 2, ..."""
    usage: generation_pb2.Usage | None
    timings: generation_pb2.Timings | None
    execution: generation_pb2.Execution | None
    seed: int | None = None
    """With the first piece: the seed in use, given or drawn."""

    @property
    def text(self) -> str:
        """Of choice 0."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of choice 0."""
        return next((choice.token_ids for choice in self.choices if choice.index == 0), ())

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of choice 0."""
        return next((choice.finish_reason for choice in self.choices if choice.index == 0), None)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Who answered, and every replica it knows."""

    server: control_pb2.ServerInfo
    replicas: Sequence[control_pb2.ReplicaLoad]


def answer_of(response: generation_pb2.GenerateResponse | generation_pb2.ChatResponse) -> Answer:
    """The Python form of a response of either kind."""
    return Answer(
        request_id=response.request_id,
        choices=tuple(_choice(choice) for choice in response.choices),
        sequence=response.sequence,
        usage=response.usage if response.HasField("usage") else None,
        timings=response.timings if response.HasField("timings") else None,
        execution=response.execution if response.HasField("execution") else None,
        seed=response.seed if response.HasField("seed") else None,
    )


def _choice(choice: generation_pb2.Choice | generation_pb2.ChatChoice) -> Choice:
    stopped_by = choice.WhichOneof("stopped_by")
    return Choice(
        index=choice.index,
        text=choice.text if isinstance(choice, generation_pb2.Choice) else choice.message.content,
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(_logprob(logprob) for logprob in choice.logprobs),
        finish_reason=_FINISH_REASONS.get(choice.finish_reason),
        stop_string=choice.stop_string if stopped_by == "stop_string" else None,
        stop_token_id=choice.stop_token_id if stopped_by == "stop_token_id" else None,
    )


def _logprob(logprob: generation_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in logprob.top)
    return TokenLogprob(logprob.token_id, logprob.logprob, top)
