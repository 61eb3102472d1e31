from __future__ import annotations

import pytest
import torch

from worker.constraints import apply_constraints
from worker.request import GenerateRequest
from worker.sampling import SamplingParams
from worker.sequence import Sequence


@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 1e-6, 2.0])
def test_no_repetition_penalty_that_is_allowed_makes_a_logit_infinite(penalty: float) -> None:
    sampling = SamplingParams(repetition_penalty=penalty)
    request = GenerateRequest(request_id="r", prompt_token_ids=(0, 1), sampling=sampling)
    sequence = Sequence(request, 0, max_tokens=1, arrival_s=0.0, token_ids=[0, 1])
    logits = torch.tensor([50.0, -50.0, 3.0])
    apply_constraints(logits, sequence, ())
    assert torch.isfinite(logits).all()
    assert logits[2] == 3.0
