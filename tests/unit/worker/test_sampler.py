"""What a row may choose, and how often it does, by the plain torch sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.philox import uniforms
from tests.fakes.sampled_rows import EOS, Rows, sequence
from worker.logprobs import logprob_of
from worker.mass import FRACTION_ONE, masses, share, share_up
from worker.sampler import CANDIDATES, sample
from worker.sampling import SamplingParams
from worker.sampling_views import MAX_COUNT

NUM_DRAWS = 4000


def chosen(logits: torch.Tensor, *sequences: Any, is_static: bool = True) -> list[int]:
    """One token for each sequence; one row of logits may serve all."""
    rows = Rows(sequences, logits.expand(len(sequences), -1))
    packed, _ = sample(rows.logits, rows.views, rows.needs, is_static=is_static)
    return packed[:, 0].tolist()


def draws(logits: torch.Tensor, count: int = NUM_DRAWS, **params: Any) -> list[int]:
    """The first tokens of as many requests that differ in their seeds."""
    return chosen(logits, *(sequence(SamplingParams(seed=seed, **params)) for seed in range(count)))


def support(logits: torch.Tensor, **params: Any) -> set[int]:
    return set(draws(logits, **params))


def greedy(logits: torch.Tensor, generated: tuple[int, ...] = (), **params: Any) -> int:
    return chosen(logits, sequence(SamplingParams(temperature=0.0, **params), generated=generated))[0]


def test_masses_are_powers_of_two_within_two_parts_in_ten_million() -> None:
    exponents = -torch.linspace(0, 30, 10_001)
    exact = 2.0 ** exponents.double() * 2.0**40
    assert ((masses(exponents).double() - exact).abs() <= 1 + 2e-7 * exact).all()
    assert masses(torch.tensor([0.0, -1.0, -40.0, -40.01, -torch.inf, torch.nan])).tolist() == [
        2**40,
        2**39,
        1,
        0,
        0,
        0,
    ]


@given(st.integers(0, 2**61), st.integers(0, FRACTION_ONE))
def test_shares_are_exact_where_the_product_would_overflow(total: int, fraction: int) -> None:
    exact = total * fraction
    pair = torch.tensor(total), torch.tensor(fraction)
    assert int(share(*pair)) == exact >> 24
    assert int(share_up(*pair)) == -(-exact >> 24)


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(50)
    logits[[7, 9]] = 1.0
    assert greedy(logits, logit_bias={1: -100.0}) == 7


def test_greedy_rows_in_a_random_batch_take_the_likeliest() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    mixed = [sequence(SamplingParams(seed=seed, temperature=float(seed % 2), logprobs=0)) for seed in range(40)]
    found = chosen(logits, *mixed)
    assert set(found[::2]) == {int(logits.argmax())}
    assert len(set(found[1::2])) > 5


def chi_square(found: list[int], probabilities: torch.Tensor) -> float:
    """How many standard deviations the statistic lies above its mean."""
    expected = probabilities.double().numpy() * len(found)
    counts = np.bincount(found, minlength=len(expected))
    assert not counts[expected == 0].any()
    kept = expected > 0
    statistic = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(5))
    found = draws(logits, 20_000, temperature=temperature)
    assert chi_square(found, torch.softmax(logits.double() / temperature, -1)) < 4


def test_draws_from_a_cut_distribution_follow_what_is_left_of_it() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(6))
    probabilities = torch.softmax(logits.double(), -1)
    order = probabilities.argsort(descending=True)[:8]
    kept = order[: int((probabilities[order].cumsum(0) / probabilities[order].sum() < 0.9).sum()) + 1]
    left = torch.zeros_like(probabilities)
    left[kept] = probabilities[kept]
    found = draws(logits, 20_000, top_k=8, top_p=0.9)
    assert chi_square(found, left / left.sum()) < 4


def test_the_random_number_depends_on_seed_choice_and_position_alone() -> None:
    logits = torch.zeros(1 << 12)
    generated = (4, 4, 4)
    row = sequence(SamplingParams(seed=-5), prompt=(9, 9), generated=generated)
    row.index = 2
    number = uniforms(np.array([-5]), np.array([2]), np.array([len(generated)]))[0]
    assert chosen(logits, row) == [int(number * len(logits))]
    assert chosen(logits, sequence(SamplingParams(seed=1)), row)[1] == int(number * len(logits))


def test_top_k_keeps_the_k_likeliest() -> None:
    assert support(torch.arange(10.0) / 10, top_k=3) == {7, 8, 9}
    assert support(torch.randn(30), top_k=1, temperature=50.0).__len__() == 1


def test_tokens_that_tie_with_the_kth_are_kept() -> None:
    assert support(torch.tensor([1.0, 1.0, 1.0, 0.0]), top_k=2) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert support(logits, top_p=0.49) == {1}
    assert support(logits, top_p=0.6) == {1, 2}
    assert support(logits, top_p=0.8) == {1, 2, 3}
    assert support(logits, top_p=1.0) == {0, 1, 2, 3}
    assert support(logits, top_p=1e-30) == {1}


def test_top_p_counts_only_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # After top-k 2 the first token alone holds 4/7 of the mass.
    assert support(logits, top_k=2, top_p=0.55) == {0}
    assert support(logits, top_k=2, top_p=0.6) == {0, 1}


def test_min_p_drops_what_is_too_unlikely_beside_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert support(logits, min_p=0.29) == {0, 1, 2}
    assert support(logits, min_p=0.5) == {0, 1}


def test_only_allowed_tokens_are_drawn() -> None:
    logits = torch.randn(90)
    assert support(logits, allowed_token_ids=(2, 35, 89)) == {2, 35, 89}
    assert support(logits, allowed_token_ids=(2, 35, 89), top_p=0.999999, top_k=60) == {2, 35, 89}


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_flat_distribution_over_a_large_vocabulary_is_cut_in_the_right_place(top_p: float, is_static: bool) -> None:
    width = 2 * CANDIDATES
    rows = [sequence(SamplingParams(seed=seed, top_p=top_p)) for seed in range(1500)]
    found = chosen(torch.linspace(0, 1e-3, width), *rows, is_static=is_static)
    assert min(found) == pytest.approx(width * (1 - top_p), abs=width * 0.01 + 4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 1, 5, 64]), st.floats(0.05, 1), st.sampled_from([0.0, 0.01, 0.3]))
def test_a_row_is_drawn_alike_alone_and_in_any_company(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(3 * CANDIDATES, generator=torch.Generator().manual_seed(seed))
    subject = sequence(SamplingParams(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.1))
    others = [
        sequence(SamplingParams(temperature=0.0, logit_bias={7: 9.0})),
        sequence(SamplingParams(seed=1, top_k=3 * CANDIDATES, top_p=0.99)),
    ]
    alone = chosen(logits, subject, is_static=False)
    assert chosen(logits, *others, subject)[-1:] == chosen(logits, subject, *others, is_static=False)[:1] == alone


def test_the_repetition_penalty_weakens_tokens_of_prompt_and_answer_once() -> None:
    logits = torch.tensor([4.0, 3.0, -1.0, 0.0, 0.0, 0.0])
    assert greedy(logits, repetition_penalty=1.5) == 0
    assert greedy(logits, generated=(0, 0, 0), repetition_penalty=1.3) == 0  # 4 / 1.3 > 3 / 1.3
    row = sequence(SamplingParams(temperature=0.0, repetition_penalty=1.9), prompt=(0,), generated=(5,))
    assert chosen(logits, row) == [1]
    negative = sequence(SamplingParams(temperature=0.0, repetition_penalty=1.9), prompt=(0, 1), generated=())
    assert chosen(torch.tensor([-1.0, -1.5, -1.6, -3.0, -3.0, -3.0]), negative) == [2]


def test_presence_counts_tokens_of_the_answer_once_and_frequency_each_time() -> None:
    logits = torch.tensor([2.0, 1.2, 0.5, 0.0, 0.0, 0.0])
    assert greedy(logits, presence_penalty=1.0) == 0  # nothing generated yet; the prompt does not count
    assert greedy(logits, generated=(0, 0, 0), presence_penalty=0.7) == 0
    assert greedy(logits, generated=(0,), presence_penalty=1.0) == 1
    assert greedy(logits, generated=(0, 0, 0), frequency_penalty=0.3) == 1


@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 1e-6, 2.0])
def test_no_repetition_penalty_that_is_allowed_makes_a_row_infinite(penalty: float) -> None:
    row = sequence(SamplingParams(repetition_penalty=penalty, temperature=0.0), prompt=(0, 1))
    rows = Rows([row], torch.tensor([[50.0, -50.0, 3.0]]))
    packed, _ = sample(rows.logits, rows.views)
    assert packed.tolist() == [[0, 1]]


def test_a_bias_is_added_after_penalties() -> None:
    row = sequence(SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 5.0}), prompt=(0,))
    assert chosen(torch.tensor([2.0, 5.9, 6.1]), row) == [2]  # 2 / 2 + 5 = 6
    assert chosen(torch.tensor([2.0, 5.9, 5.9]), row) == [0]


def test_stop_tokens_are_banned_until_there_are_min_tokens() -> None:
    logits = torch.zeros(6)
    logits[list(EOS)], logits[4], logits[2] = 9.0, 8.0, 7.0
    banned = {"min_tokens": 2, "stop_token_ids": (4,)}
    assert greedy(logits, generated=(1,), **banned) == 2
    assert greedy(logits, generated=(1,), ignore_eos=True, **banned) == EOS[0]
    assert greedy(logits, generated=(1, 1), logit_bias={0: 0.5}, **banned) == EOS[0]


def test_occurrences_stop_counting_before_they_overflow() -> None:
    row = sequence(SamplingParams(temperature=0.0, frequency_penalty=1e-3), generated=[2] * (MAX_COUNT + 5))
    rows = Rows([row], torch.tensor([[0.0, 0.0, 100.0, 0.0, 0.0, 0.0]]))
    sample(rows.logits, rows.views)
    assert int(rows.views.counts[0, 2]) >> 1 == MAX_COUNT


def test_a_step_moves_its_seats_on_and_nothing_else() -> None:
    row = sequence(SamplingParams(temperature=0.0, presence_penalty=0.1), prompt=(1,), generated=(2, 2))
    rows = Rows([row], torch.tensor([[0.0, 5.0, 1.0, 0.0]]), bucket=3)
    padding = rows.views.whole[-1].clone()
    sample(rows.logits, rows.views)
    assert rows.views.counts[0].tolist() == [0, 3, 4, 0]
    assert int(rows.views.whole[0, 5]) == 3
    assert rows.table.last_tokens.tolist() == [1, 0]
    assert torch.equal(rows.views.whole[-1], padding)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_reported_and_its_neighbour_is_not(bad: float) -> None:
    logits = torch.randn(2, 40)
    logits[0, 17] = bad
    rows = Rows([sequence(SamplingParams(top_p=0.8)) for _ in range(2)], logits)
    packed, _ = sample(rows.logits, rows.views)
    assert packed[:, 1].tolist() == [0, 1]
    assert 0 <= int(packed[0, 0]) < 40


@pytest.mark.parametrize("count", [0, 1, 20])
def test_log_probabilities_are_the_models_own(count: int) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 4
    row = sequence(SamplingParams(temperature=0.1, logit_bias={11: 100.0}, logprobs=count))
    rows = Rows([row], logits[None])
    packed, details = sample(rows.logits, rows.views)
    found = logprob_of(details[0].tolist(), count)
    exact = torch.log_softmax(logits.double(), -1)
    assert found.token_id == int(packed[0, 0]) == 11
    assert found.logprob == pytest.approx(float(exact[11]), abs=1e-5)
    assert [token for token, _ in found.top] == exact.topk(count).indices.tolist()
    np.testing.assert_allclose([value for _, value in found.top], exact.topk(count).values.numpy(), atol=1e-5)


def test_a_small_vocabulary_has_fewer_likeliest_tokens_than_may_be_asked_for() -> None:
    rows = Rows([sequence(SamplingParams(logprobs=20))], torch.tensor([[0.0, 0.0, 1.0]]))
    _, details = sample(rows.logits, rows.views)
    assert [token for token, _ in logprob_of(details[0].tolist(), 20).top] == [2, 0, 1]
