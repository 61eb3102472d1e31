from __future__ import annotations

import pytest

from worker.errors import EngineStalled
from worker.progress import FIRST_STEP_S, MIN_STALL_S, ProgressWatch, allowed_step_s


@pytest.mark.parametrize(
    ("predicted_s", "allowed_s"), [(None, FIRST_STEP_S), (0.0, FIRST_STEP_S), (0.001, MIN_STALL_S), (3.0, 12.0)]
)
def test_a_step_may_take_four_times_what_was_predicted_and_never_less_than_two_seconds(
    predicted_s: float | None, allowed_s: float
) -> None:
    assert allowed_step_s(predicted_s) == allowed_s


def test_the_age_of_a_step_grows_until_it_ends() -> None:
    watch = ProgressWatch()
    assert watch.age_s(5.0) == 0
    watch.begin(10.0, 0.1)
    assert (watch.age_s(10.5), watch.age_s(13.0)) == (0.5, 3.0)
    with pytest.raises(EngineStalled, match=r"3\.0 s, 2\.0 s are allowed"):
        watch.check(13.0)
    watch.end()
    assert watch.age_s(20.0) == 0


def test_preparation_is_no_step_and_may_take_longer() -> None:
    watch = ProgressWatch()
    watch.begin(0.0, None, is_preparing=True)
    assert watch.is_preparing
    watch.check(FIRST_STEP_S)
    watch.end()
    assert not watch.is_preparing
