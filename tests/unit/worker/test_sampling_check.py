from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fakes.triton_interpreter import DEVICE
from worker import sampler
from worker.kernels import sample as fused
from worker.sampler import Sampled
from worker.sampling_check import agrees
from worker.sampling_table import Need, SamplingViews

VOCAB = 400


def test_the_fused_stage_agrees_with_the_plain_one() -> None:
    assert agrees(fused.sample, VOCAB, DEVICE)


@pytest.mark.parametrize("fault", ["token", "details", "counts", "position", "last token"])
def test_a_stage_that_does_anything_else_is_found_out(fault: str) -> None:
    def spoilt(logits: torch.Tensor, views: SamplingViews, needs: Need) -> Sampled:
        packed, details = sampler.sample(logits, views, needs)
        if fault == "token":
            packed[3, 0] ^= 1
        if fault == "details":
            details[3, 4] += 1
        if fault == "counts":
            views.counts[3, 5] += 2
        if fault == "position":
            views.whole[2, 5] -= 1
        if fault == "last token":
            views.last_tokens[0] += 1
        return packed, details

    assert not agrees(spoilt, VOCAB, torch.device("cpu"))


def test_what_nobody_reads_may_differ() -> None:
    def other(logits: torch.Tensor, views: SamplingViews, needs: Need) -> Sampled:
        packed, details = sampler.sample(logits, replace(views), needs)
        details[0] = -1  # the first row asks for no log-probabilities
        return packed, details

    assert agrees(other, VOCAB, torch.device("cpu"))
