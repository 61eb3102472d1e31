from __future__ import annotations

import pytest
import torch

from tests.fakes import reference_kernels as reference
from tests.fakes.triton_interpreter import DEVICE
from worker.kernels.greedy import RowState, greedy, pick_tokens


def logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 4096, 4097, 12_345])
def test_the_largest_logit_is_chosen_and_logits_become_single_precision(vocab: int, dtype: torch.dtype) -> None:
    given = logits(3, vocab, dtype)
    given[:, vocab // 2] = 9.0
    given[1, vocab - 1] = 10.0
    given[2] -= 100.0

    wide, chosen = greedy(given)

    expected_wide, expected = reference.greedy(given)
    assert torch.equal(wide, expected_wide)
    assert torch.equal(chosen, expected)


def test_equal_logits_choose_the_lowest_id() -> None:
    given = torch.zeros(3, 9000, device=DEVICE)
    given[0, [8000, 5000, 300]] = 1.0
    given[1] = -0.0
    given[1, 4000] = 0.0
    given[2] = float("-inf")
    assert greedy(given)[1].tolist() == [[300, 1], [0, 1], [0, 0]]


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5000, 8999])
def test_a_row_with_a_nan_or_an_infinite_best_is_not_finite_and_the_others_are(bad: float, place: int) -> None:
    given = logits(3, 9000)
    given[1, place] = bad
    assert greedy(given)[1][:, 1].tolist() == [1, 0, 1]


def test_minus_infinity_below_the_best_is_no_fault() -> None:
    given = torch.full((1, 100), float("-inf"), device=DEVICE)
    given[0, 42] = -3.0
    assert greedy(given)[1].tolist() == [[42, 1]]


def test_rows_move_on_to_their_tokens_and_padding_stays() -> None:
    given = torch.zeros(3, 10, device=DEVICE)
    given[torch.arange(3), torch.tensor([4, 7, 1])] = 1.0
    state = RowState(
        last_tokens=torch.full((5,), -9, device=DEVICE),
        positions=torch.tensor([10, 20, 0], device=DEVICE),
        live=torch.tensor([1, 1, 0], device=DEVICE),
        sources=torch.tensor([-1, 0, -1], device=DEVICE),
    )

    greedy(given, state)

    assert state.last_tokens.tolist() == [4, 7, 1, -9, -9]
    assert state.positions.tolist() == [11, 21, 0]
    assert state.sources.tolist() == [0, 1, 2]


def test_a_rows_token_comes_from_the_step_before_or_from_the_host() -> None:
    tokens = pick_tokens(
        torch.tensor([11, 12, 13], device=DEVICE),
        torch.tensor([2, -1, 0], device=DEVICE),
        torch.tensor([100, 101, 102], device=DEVICE),
    )
    assert tokens.tolist() == [102, 12, 100]
