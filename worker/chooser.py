"""Logits of a step -> tokens, finiteness and log-probabilities, for any runner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from worker.batch import Segment
from worker.constraints import apply_constraints, needs_constraints
from worker.inputs import SamplingInputs
from worker.request import Logprob
from worker.sampler import greedy, sample


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry for each segment of the batch that samples, in order."""

    token_ids: list[int]
    is_finite: list[bool]
    """False: the row's logits hold NaN or infinity, and its token means nothing."""
    logprobs: list[Logprob | None]
    runner: str = "eager"


class TokenChooser:
    """Applies each request's constraints and draws its token."""

    def __init__(self, *, max_rows: int, eos_token_ids: Collection[int], device: torch.device) -> None:
        self.eos_token_ids = eos_token_ids
        self.inputs = SamplingInputs(max_batch=max_rows, device=device)

    def choose(self, logits: torch.Tensor, segments: Sequence[Segment], runner: str) -> StepOutput:
        """`logits` [rows, vocab] float32, may be changed; rows past `segments` are padding and never looked at."""
        logits = logits[: len(segments)]
        wants_logprobs = any(segment.sequence.request.sampling.logprobs is not None for segment in segments)
        raw = logits.clone() if wants_logprobs else logits
        for row, segment in enumerate(segments):
            if needs_constraints(segment.sequence):
                apply_constraints(logits[row], segment.sequence, self.eos_token_ids)
        is_finite = logits.amax(dim=-1).isfinite()
        token_ids = self._draw(logits, segments, is_finite).tolist()
        logprobs = [_logprob(raw[row], segment, token_ids[row]) for row, segment in enumerate(segments)]
        return StepOutput(token_ids, is_finite.tolist(), logprobs, runner)

    def _draw(self, logits: torch.Tensor, segments: Sequence[Segment], is_finite: torch.Tensor) -> torch.Tensor:
        if all(segment.sequence.request.sampling.is_greedy for segment in segments):
            return greedy(logits)
        self.inputs.fill(segments, len(segments))
        rows = {name: tensor[: len(segments)] for name, tensor in self.inputs.staging.device.items()}
        # A row without a finite maximum would draw out of range; it is reported, not used.
        return sample(logits.masked_fill(~is_finite[:, None], 0.0), rows)


def needs_logits(segments: Sequence[Segment]) -> bool:
    """Whether anything but the likeliest token of the bare logits is asked for by one of `segments`."""
    return any(
        not segment.sequence.request.sampling.is_greedy
        or segment.sequence.request.sampling.logprobs is not None
        or needs_constraints(segment.sequence)
        for segment in segments
    )


def _logprob(logits: torch.Tensor, segment: Segment, token_id: int) -> Logprob | None:
    """Of the model's own distribution, before temperature and constraints."""
    count = segment.sequence.request.sampling.logprobs
    if count is None:
        return None
    distribution = torch.log_softmax(logits, dim=-1)
    top = distribution.topk(count)
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Logprob(token_id, distribution[token_id].item(), pairs)
