"""What a request adds to or takes from its logits before sampling: penalties, biases, masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch

from worker.sampling import SamplingParams
from worker.sequence import Sequence

LEAST_REPETITION_PENALTY = 1e-6
"""Dividing logits by less could overflow, which would look like a model that is broken."""


def needs_constraints(sequence: Sequence) -> bool:
    """Whether `apply_constraints` would change this sequence's logits."""
    params = sequence.request.sampling
    return bool(
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids
        or sequence.num_generated < params.min_tokens
    )


def apply_constraints(logits: torch.Tensor, sequence: Sequence, eos_token_ids: Collection[int]) -> None:
    """Change one row, [vocab] float32, in place."""
    params = sequence.request.sampling
    if params.has_penalties:
        _penalise(logits, sequence, params)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.allowed_token_ids:
        ids = torch.tensor(params.allowed_token_ids, device=logits.device)
        allowed = logits[ids]
        logits.fill_(-torch.inf)
        logits[ids] = allowed
    if sequence.num_generated < params.min_tokens:
        banned = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        logits[torch.tensor(sorted(banned), dtype=torch.int64, device=logits.device)] = -torch.inf


def _penalise(logits: torch.Tensor, sequence: Sequence, params: SamplingParams) -> None:
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits.device)
        values = logits[seen]
        factor = max(params.repetition_penalty, LEAST_REPETITION_PENALTY)
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if sequence.num_generated and (params.presence_penalty or params.frequency_penalty):
        occurrences = Counter(sequence.generated)
        ids = torch.tensor(list(occurrences), device=logits.device)
        counts = torch.tensor(list(occurrences.values()), device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
