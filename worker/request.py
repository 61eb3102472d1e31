"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from worker.errors import WorkerError
from worker.sampling import SamplingParams


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


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


EngineEvent = ChoiceDelta | RequestFailed
