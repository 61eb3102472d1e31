"""The fused sampler against the plain one, bit for bit, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.sampled_rows import Rows, sequence
from tests.fakes.triton_interpreter import DEVICE
from worker import sampler
from worker.kernels import sample as fused
from worker.kernels.sampling_scratch import CAPACITY
from worker.sampling import SamplingParams
from worker.sampling_needs import ALL_NEEDS
from worker.sampling_views import SamplingViews

# What a row that is not finite computes means nothing, and NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

VOCAB = 700
STATE = ("whole", "counts", "last_tokens")
DETAIL_HEAD = 3


def compare(rows: Rows, *, block: int = 256) -> tuple[torch.Tensor, SamplingViews]:
    """Both samplers from the same state, every output and all state equal; returns what the fused one leaves."""
    plain, kernel = rows.copy(), rows.copy()
    expected, expected_details = sampler.sample(rows.logits, plain)
    packed, details = fused.sample(rows.logits, kernel, block=block)
    live = len(rows.sequences)
    assert packed[:live].tolist() == expected[:live].tolist()
    for name in STATE:
        assert torch.equal(getattr(plain, name), getattr(kernel, name)), name
    for row, one in enumerate(rows.sequences):
        count = one.request.sampling.logprobs
        if count is not None:
            end = DETAIL_HEAD + count
            assert details[row, :end].tolist() == expected_details[row, :end].tolist()
    return packed[:live], kernel


def logits(rows: int, spread: float, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE)


TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.02, 0.7, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 7, 300, VOCAB, 5000]),
    top_p=st.sampled_from([1.0, 0.99999999, 0.97, 0.5, 0.01, 1e-20]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.7, 1e-20]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.9]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.31]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=20),
    allowed_token_ids=st.one_of(st.just(()), st.lists(TOKENS, min_size=1, max_size=9).map(tuple)),
    stop_token_ids=st.lists(TOKENS, max_size=4).map(tuple),
    min_tokens=st.sampled_from([0, 2, 50]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
)
HISTORY = st.lists(TOKENS, min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(PARAMS, HISTORY, HISTORY), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    st.integers(0, 2**31),
)
def test_every_combination_of_parameters_gives_the_tokens_and_the_state_of_the_plain_sampler(
    drawn: list[tuple[SamplingParams, list[int], list[int]]], spread: float, seed: int
) -> None:
    made = [sequence(params, prompt, generated) for params, prompt, generated in drawn]
    compare(Rows(made, logits(len(made), spread, seed=seed), bucket=len(made) + 1, seed=seed))


KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.92},
    "both": {"top_k": 90, "top_p": 0.8},
    "all three": {"top_k": 90, "top_p": 0.8, "min_p": 0.1},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
    "log-probabilities": {"temperature": 0.0, "logprobs": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_follow_each_other_go_on_from_the_state_on_the_device(kind: str) -> None:
    made = [sequence(SamplingParams(seed=seed, **KINDS[kind]), (1, 2), (5,)) for seed in range(2)]
    rows = Rows(made, logits(2, 2.0))
    for step in range(3):
        _, after = compare(rows)
        for name in STATE:
            getattr(rows.views, name).copy_(getattr(after, name))
        for one, token in zip(made, rows.tokens(after.last_tokens), strict=True):
            one.token_ids.append(token)
        # What the host would write from scratch is what the device has come to.
        again = Rows(made, logits(2, 2.0))
        assert again.copy().whole[:2].tolist() == rows.copy().whole[:2].tolist()
        assert again.copy().counts[:2].tolist() == rows.copy().counts[:2].tolist()
        rows.logits.copy_(logits(2, 2.0, seed=step + 1))
        rows.table.last_tokens[:2] = rows.logits.argmax(dim=-1)


@pytest.mark.parametrize("block", [128, 1024])
def test_the_outcome_does_not_depend_on_how_a_row_is_divided(block: int) -> None:
    made = [sequence(SamplingParams(seed=3, top_p=0.9, logprobs=20, frequency_penalty=0.1), (1,), (2, 2))]
    rows = Rows(made, logits(1, 1.5))
    assert torch.equal(compare(rows, block=block)[0], compare(rows, block=256)[0])


@pytest.mark.parametrize("kind", ["top-k", "top-p", "both"])
def test_a_row_whose_cut_lies_among_more_logits_than_the_list_holds_is_searched_whole(kind: str) -> None:
    flat = logits(1, 1e-4, vocab=CAPACITY + 900)
    flat[0, 17] = flat[0, CAPACITY + 99] = flat.max()  # and with ties
    compare(Rows([sequence(SamplingParams(seed=9, **KINDS[kind] | {"top_k": CAPACITY - 99}))], flat), block=2048)


@pytest.mark.parametrize("vocab", [5, 255, 256, 257])
def test_vocabularies_around_a_block(vocab: int) -> None:
    params = SamplingParams(seed=4, top_p=0.9, top_k=4, logprobs=20, min_tokens=9, allowed_token_ids=(0, vocab - 1))
    compare(Rows([sequence(params, (1,), (2,))], logits(1, 1.0, vocab=vocab)))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_not(bad: float) -> None:
    values = logits(3, 1.0)
    values[1, 400] = bad
    kinds = [SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, top_k=5, repetition_penalty=1.2)]
    made = [sequence(kinds[0]), sequence(kinds[1]), sequence(replace(kinds[1], logprobs=2))]
    packed, _ = compare(Rows(made, values))
    assert packed[:, 1].tolist() == [1, 0, 1]


def test_a_row_without_an_allowed_token_is_not_finite() -> None:
    params = SamplingParams(allowed_token_ids=(7,), min_tokens=9, stop_token_ids=(7,))
    assert compare(Rows([sequence(params)], logits(1, 1.0)))[0][0, 1] == 0


def test_a_row_alone_has_the_token_it_has_in_a_batch() -> None:
    values = logits(4, 2.0)
    made = [sequence(SamplingParams(seed=seed, **kind)) for seed, kind in enumerate(list(KINDS.values())[:4])]
    together = compare(Rows(made, values))[0]
    for row, one in enumerate(made):
        assert torch.equal(compare(Rows([one], values[row : row + 1]))[0], together[row : row + 1])


def test_launches_that_no_row_needs_may_be_left_out() -> None:
    rows = Rows([sequence(SamplingParams(seed=6, temperature=0.8))], logits(1, 2.0))
    alone, all_launches = rows.copy(), rows.copy()
    assert torch.equal(
        fused.sample(rows.logits, alone, rows.needs)[0], fused.sample(rows.logits, all_launches, ALL_NEEDS)[0]
    )
