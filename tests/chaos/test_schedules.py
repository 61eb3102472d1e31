"""Random schedules of two faults at once: every invariant holds, and a seed tells the same story twice."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.real_schedules import run_real_schedule
from tests.chaos.schedules import run_schedule
from tests.chaos.virtual_time import Deadlock, run_virtual

FIRST = 1
COUNT = 30


def test_no_schedule_breaks_an_invariant() -> None:
    broken = {}
    for seed in range(FIRST, FIRST + COUNT):
        report = run_schedule(seed)
        if report.problems:
            broken[seed] = (report.faults, report.problems[:3])
    assert broken == {}, "see python -m tests.chaos.schedules --seed N"


@pytest.mark.parametrize("seed", [4, 6, 11])
async def test_no_schedule_of_processes_breaks_an_invariant(seed: int) -> None:
    done = await run_real_schedule(seed)
    assert done.problems == [], done.faults


@pytest.mark.parametrize("seed", [8, 20])
def test_a_seed_tells_the_same_story_twice(seed: int) -> None:
    assert run_schedule(seed).digest == run_schedule(seed).digest


def test_a_loop_on_which_nothing_can_happen_any_more_says_so() -> None:
    with pytest.raises(Deadlock):
        run_virtual(lambda: asyncio.Event().wait())
