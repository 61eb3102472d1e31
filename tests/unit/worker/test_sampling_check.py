from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fakes.tiny_model import tiny_engine, tiny_model
from tests.fakes.triton_interpreter import DEVICE
from worker import sampler, sampling_stage
from worker.kernels import sample as fused
from worker.runner import EagerRunner
from worker.sampler import Sampled
from worker.sampling_check import agrees
from worker.sampling_needs import Need
from worker.sampling_views import SamplingViews

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


@pytest.mark.parametrize(("outcome", "is_fused"), [(True, True), (False, False), (torch.OutOfMemoryError(), False)])
def test_a_stage_serves_fused_only_if_it_agrees(
    outcome: bool | Exception, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(sampling_stage, "agrees", answer)
    monkeypatch.setattr(sampling_stage, "_may_fuse", lambda *_: True)
    runner = tiny_engine(tiny_model(), max_batch=2).runner
    assert isinstance(runner, EagerRunner)
    assert (runner.sampling._fused is not None) == is_fused
