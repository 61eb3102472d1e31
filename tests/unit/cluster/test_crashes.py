"""Whether other replicas crash at the time."""

from __future__ import annotations

from cluster.router.crashes import WINDOW_S, Crashes
from tests.fakes.script_runner import ManualClock


def test_crashes_of_others_count_once_each_and_for_a_while() -> None:
    clock = ManualClock()
    crashes = Crashes(clock=clock)
    assert crashes.num_others(()) == 0
    for incarnation in ("a", "b", "b"):
        crashes.note(incarnation)
    assert crashes.num_others(()) == 2
    assert crashes.num_others({"a"}) == 1
    assert crashes.num_others({"a", "b", "c"}) == 0
    clock.now_s += WINDOW_S - 1
    crashes.note("c")
    clock.now_s += 2
    assert crashes.num_others({"a"}) == 1


def test_a_crash_that_a_request_explains_speaks_for_nobody_else() -> None:
    crashes = Crashes()
    crashes.note("a")
    crashes.explain({"a", "not known"})
    crashes.note("a")
    assert crashes.num_others(()) == 0
