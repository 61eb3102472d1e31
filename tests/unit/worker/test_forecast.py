from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.forecast import predict_ttft_s


def predict(
    num_ahead: int = 0, num_free_rows: int = 4, prefill_tokens: int = 0, answer_tokens: float = 100, max_rows: int = 4
) -> float:
    return predict_ttft_s(
        num_ahead=num_ahead,
        num_free_rows=num_free_rows,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
        prefill_token_s=0.001,
        decode_step_s=0.01,
        answer_tokens=answer_tokens,
    )


def test_with_a_free_row_a_newcomer_waits_for_the_step_under_way_and_the_prompts_before_it() -> None:
    assert predict() == 0.01
    assert predict(prefill_tokens=50) == pytest.approx(0.06)


def test_with_every_row_held_it_waits_for_as_many_ends_as_there_are_before_it() -> None:
    # A row ends every 100 * 0.01 / 4 seconds.
    assert predict(num_free_rows=0) == pytest.approx(0.26)
    assert predict(num_free_rows=0, num_ahead=3) == pytest.approx(1.01)
    assert predict(num_free_rows=2, num_ahead=3) == pytest.approx(0.51)


@given(st.integers(0, 500), st.integers(0, 64), st.integers(0, 5000), st.floats(0, 4000), st.integers(0, 64))
def test_more_work_ahead_never_makes_it_sooner(ahead: int, free: int, prefill: int, answer: float, rows: int) -> None:
    now = predict(ahead, free, prefill, answer, rows)
    assert now >= 0
    assert predict(ahead + 1, free, prefill, answer, rows) >= now
    assert predict(ahead, free, prefill + 1, answer, rows) >= now
    assert predict(ahead, free + 1, prefill, answer, rows) <= now
