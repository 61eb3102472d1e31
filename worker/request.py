"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field

from worker.errors import InvalidRequest, WorkerError
from worker.sampling import SamplingParams, check_token_ids


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


class Criticality(enum.IntEnum):
    """What is given up first when there is too much work: the lowest."""

    SHEDDABLE = 1
    SHEDDABLE_PLUS = 2
    CRITICAL = 3
    CRITICAL_PLUS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt to continue. Token ids are checked against the vocabulary when the request is submitted."""

    request_id: str
    """Unique among the requests that are live in one engine."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline_s: float | None = None
    """On the engine's clock (`time.monotonic`); past it the request ends with DeadlineExceeded."""
    use_prefix_cache: bool = True
    """Whether blocks of equal prompts may be used, and those of this one and its answer kept for others."""
    cache_salt: str = ""
    """Only requests with the same salt share blocks. How fast an answer begins then tells nothing about other salts."""
    delivered: tuple[tuple[int, ...], ...] = ()
    """By choice, tokens that were generated elsewhere before: each choice goes on after them as if they were its own."""
    finished: frozenset[int] = frozenset()
    """Choices that have ended elsewhere: nothing is generated for them. At least one is left."""
    criticality: Criticality = Criticality.CRITICAL
    """Those of a higher class start first, and take the place of lower ones when the queue is full."""
    is_trial: bool = False
    """Suspected of ending its worker: its first prefill and decode steps run with nothing else in them."""
    trial_tokens: int = 2
    """New tokens of each choice until it has stood its trial: one of the prefill, the others of decode steps."""
    is_moved: bool = False
    """Was under way on another worker just before: it starts before requests of which nothing has begun."""

    def delivered_of(self, index: int) -> tuple[int, ...]:
        """What there is of a choice already."""
        return self.delivered[index] if index < len(self.delivered) else ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one generated token, and of the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds a finished choice spent in each stage."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one step added to one choice of one request."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """May lag behind `token_ids`: half characters and possible stop strings are held back."""
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    tier: int = 0
    """Sequence-length tier of the step, in tokens."""
    bucket: int = 0
    """Batch bucket (decode) or token bucket (prefill) of the step."""
    runner: str = "eager"
    """What ran the step: "eager" or "graph"."""
    timings: Timings | None = None
    """Set with `finish_reason`."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended without a finish reason: nothing more follows for any of its choices."""

    request_id: str
    error: WorkerError


class Phase(enum.Enum):
    """How far a request is, for whoever must know who was in a step that ended its worker."""

    SCHEDULED = "scheduled"
    """It has left the queue and is in steps from now on."""
    TRIAL_BEGAN = "trial began"
    """From now on steps compute this request and nothing else."""
    TRIAL_PASSED = "trial passed"
    """Its first steps have ended well, and it runs like any other."""


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A request has reached a phase. No step follows a beginning or an end of a trial before its `seen` is set."""

    request_id: str
    phase: Phase
    seen: threading.Event | None = None
    """Set by the host once the phase is known outside this process; the engine waits a moment for it, at most."""


EngineEvent = ChoiceDelta | RequestFailed | RequestPhase


def check_delivered(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Refuse a beginning that no answer to this request can have. Raises InvalidRequest."""
    num_choices, room = request.sampling.n, max_model_len - len(request.prompt_token_ids)
    num_known = max(len(request.delivered), 1 + max(request.finished, default=-1))
    if num_known > num_choices or min(request.finished, default=0) < 0:
        raise InvalidRequest("delivered", f"has more than the {num_choices} choices of the request")
    if len(request.finished) == num_choices:
        raise InvalidRequest("delivered", "leaves nothing to generate")
    limit = room if request.sampling.max_tokens is None else request.sampling.max_tokens
    for token_ids in request.delivered:
        if len(token_ids) > limit:
            raise InvalidRequest("delivered", f"{len(token_ids)} tokens of a choice that may have {limit}")
        check_token_ids("delivered", token_ids, vocab_size)
