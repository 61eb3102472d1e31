from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampler import CANDIDATES, greedy, sample


def rows(count: int, **values: list[float] | list[int]) -> dict[str, torch.Tensor]:
    neutral: dict[str, list[float] | list[int]] = {
        "temperature": [1.0] * count,
        "top_p": [1.0] * count,
        "min_p": [0.0] * count,
        "uniform": [0.5] * count,
    }
    tensors = {name: torch.tensor(values.get(name, default)) for name, default in neutral.items()}
    return tensors | {"top_k": torch.tensor(values.get("top_k", [0] * count), dtype=torch.int64)}


def support(logits: torch.Tensor, **values: float) -> set[int]:
    """Every token that some uniform number leads to."""
    count = 4001
    grid = np.linspace(0, 1, count, endpoint=False).tolist()
    repeated = {name: [value] * count for name, value in values.items()}
    drawn = sample(logits.expand(count, -1), rows(count, uniform=grid, **repeated))
    return set(drawn.tolist())


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [7, 9]] = 1.0
    assert greedy(logits).tolist() == [0, 7, 0]


def test_greedy_rows_in_a_random_batch_take_the_likeliest() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, rows(4, temperature=[0.0, 5.0, 0.0, 5.0], uniform=[0.99] * 4))
    assert drawn[[0, 2]].tolist() == greedy(logits)[[0, 2]].tolist()


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(1)).tolist()
    drawn = sample(logits.expand(count, -1), rows(count, uniform=uniform, temperature=[0.7] * count))
    frequency = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(frequency, torch.softmax(logits[0] / 0.7, -1), atol=0.015, rtol=0)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert support(torch.arange(10.0) / 10, top_k=3) == {7, 8, 9}


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    assert (
        support(torch.randn(30, generator=torch.Generator().manual_seed(2)), top_k=1, temperature=50.0).__len__() == 1
    )


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.25, 0.15])
    assert support(probabilities.log(), top_p=0.49) == {1}
    assert support(probabilities.log(), top_p=0.6) == {1, 2}
    assert support(probabilities.log(), top_p=0.8) == {1, 2, 3}
    assert support(probabilities.log(), top_p=1.0) == {0, 1, 2, 3}


def test_top_p_counts_only_what_top_k_leaves() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # After top-k 2 the first token alone holds 4/7 of the mass.
    assert support(probabilities.log(), top_k=2, top_p=0.55) == {0}
    assert support(probabilities.log(), top_k=2, top_p=0.6) == {0, 1}


def test_min_p_drops_what_is_too_unlikely_beside_the_likeliest() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert support(probabilities.log(), min_p=0.29) == {0, 1, 2}
    assert support(probabilities.log(), min_p=0.5) == {0, 1}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[[2, 5]] = 0.0
    assert support(logits) == {2, 5}
    assert support(logits, top_p=0.9, top_k=6) == {2, 5}


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_a_flat_distribution_over_a_large_vocabulary_needs_the_whole_sort(top_p: float) -> None:
    width = 4 * CANDIDATES
    logits = torch.linspace(0, 1e-3, width)
    kept = sample(logits.expand(2, -1), rows(2, uniform=[0.0, 1 - 2**-24], top_p=[top_p] * 2))
    assert kept[1] == width - 1
    assert kept[0] == pytest.approx(width * (1 - top_p), abs=width * 0.01 + 2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.05, 5),
    st.sampled_from([0, 1, 2, 5, 64]),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_a_row_is_drawn_alike_alone_and_in_any_company(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 300, generator=generator) * 3
    uniform = torch.rand(5, generator=generator).tolist()
    company = rows(
        5,
        uniform=uniform,
        temperature=[temperature, 0.0, 1.0, 2.0, 0.5],
        top_k=[top_k, 0, 3, 0, 300],
        top_p=[top_p, 1.0, 1.0, 0.3, 1.0],
        min_p=[min_p, 0.0, 0.0, 0.0, 0.9],
    )
    together = sample(logits, company)
    alone = [int(sample(logits[i : i + 1], {k: v[i : i + 1] for k, v in company.items()})) for i in range(5)]
    assert together.tolist() == alone
