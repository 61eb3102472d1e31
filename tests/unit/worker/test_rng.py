from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.philox import uniforms
from worker.rng import UNIFORM_BITS, device_fractions

Ints = npt.NDArray[np.int64]


def drawn(seeds: Ints, choices: Ints, positions: Ints) -> Ints:
    return device_fractions(*map(torch.from_numpy, (seeds, choices, positions))).numpy()


def one(seed: int, choice: int, position: int) -> int:
    return int(drawn(np.array([seed]), np.array([choice]), np.array([position]))[0])


def test_the_first_word_is_the_published_known_answer_of_philox() -> None:
    assert one(0, 0, 0) == 0x6627E8D5 >> 8


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 7), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=20,
    )
)
def test_torch_and_numpy_draw_the_same_bits(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, dtype=np.int64).T.copy()
    expected = uniforms(*columns)
    assert (drawn(*columns) == expected * 2**UNIFORM_BITS).all()
    assert (expected >= 0).all()
    assert (expected < 1).all()


def test_a_row_draws_the_same_number_whatever_is_beside_it() -> None:
    seeds, choices, positions = np.arange(50), np.arange(50) % 8, np.arange(50) * 7
    together = drawn(seeds, choices, positions)
    alone = [one(int(s), int(c), int(p)) for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert together.tolist() == alone


def test_numbers_are_uniform_over_seeds_choices_and_positions() -> None:
    seeds, choices, positions = (axis.ravel() for axis in np.meshgrid(np.arange(40), np.arange(8), np.arange(60)))
    counts, _ = np.histogram(drawn(seeds, choices, positions), bins=64, range=(0, 2**UNIFORM_BITS))
    expected = counts.sum() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 120  # 63 degrees of freedom: p < 1e-5 beyond
