"""What a step brings."""

from __future__ import annotations

from dataclasses import dataclass

from worker.request import Logprob


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry for each segment of the batch that samples, in order."""

    token_ids: list[int]
    is_finite: list[bool]
    """False: the row's logits hold NaN or infinity, and its token means nothing."""
    logprobs: list[Logprob | None]
    runner: str = "eager"
