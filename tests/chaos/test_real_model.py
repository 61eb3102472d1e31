"""The embedded model in deterministic mode: an answer that goes on elsewhere is the answer that had been begun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.chaos.real_resume import CASES, RealResume

pytestmark = pytest.mark.model
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def real() -> Iterator[RealResume]:
    before = torch.get_num_threads()
    yield RealResume()
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", ["seeded, four choices, logprobs", "penalties"])
def test_an_answer_is_the_same_after_an_interruption_at_any_token(case: str, real: RealResume) -> None:
    outcome = real.interrupt(real.case(case, max_tokens=NUM_TOKENS), range(1, NUM_TOKENS))
    assert outcome.resumed >= 2
    assert outcome.differences == []


def test_the_cases_hold_every_part_of_sampling_that_has_a_state() -> None:
    assert any(case.has_penalties for case in CASES.values())
    assert any(case.stop for case in CASES.values())
    assert any(not case.is_greedy and case.n == 4 for case in CASES.values())
