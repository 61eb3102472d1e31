"""Compares the fused sampling stage with the plain one on the device that it is going to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from worker.graphs.key import GraphKey
from worker.sample_draw import SampleDraw
from worker.sampler import Sampled, sample
from worker.sampling_needs import ALL_NEEDS, Need
from worker.sampling_table import SamplingTable
from worker.sampling_views import Place, SamplingViews, Whole

Sample = Callable[[torch.Tensor, SamplingViews, Need], Sampled]

_BUCKET = 10
"""Half of its rows, and one, are drawn: each kind once."""
_SPREADS = (1.0, 0.2)
"""Of logits, as a part of what is drawn: about those of a trained model, and flat ones."""
_STATE = ("whole", "counts", "last_tokens")


def agrees(fused: Sample, vocab_size: int, device: torch.device) -> bool:
    """Whether `fused` gives the tokens, the log-probabilities and the state of the plain stage. Waits for the device."""
    rows = _BUCKET // 2 + 1
    last_tokens = torch.zeros(_BUCKET, dtype=torch.int64, device=device)
    table = SamplingTable(max_rows=_BUCKET, vocab_size=vocab_size, eos_token_ids=(), last_tokens=last_tokens)
    logits = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
    draw = SampleDraw(table, logits, GraphKey("sample", 0, _BUCKET), ALL_NEEDS)
    for seed, spread in enumerate(_SPREADS):
        draw(torch.Generator().manual_seed(seed), False)
        logits.mul_(spread)
        views = table.views(rows)
        if not _is_equal(views, _run(sample, logits, views), _run(fused, logits, views)):
            return False
    return True


def _run(stage: Sample, logits: torch.Tensor, views: SamplingViews) -> tuple[Sampled, SamplingViews]:
    copied = SamplingViews(**{field.name: getattr(views, field.name).clone() for field in fields(views)})
    return stage(logits, copied, ALL_NEEDS), copied


def _is_equal(
    views: SamplingViews, expected: tuple[Sampled, SamplingViews], found: tuple[Sampled, SamplingViews]
) -> bool:
    (packed, details), state = expected
    (other_packed, other_details), other_state = found
    wanted = views.whole[views.places[:, Place.SEAT], Whole.NUM_LOGPROBS]
    columns = torch.arange(details.shape[1], device=details.device)
    is_read = (columns < wanted[:, None] + 3) & (wanted[:, None] >= 0)
    return (
        torch.equal(packed, other_packed)
        and torch.equal(details.where(is_read, 0), other_details.where(is_read, 0))
        and all(torch.equal(getattr(state, name), getattr(other_state, name)) for name in _STATE)
    )
