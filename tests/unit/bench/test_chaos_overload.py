from __future__ import annotations

import argparse
from typing import Any

import grpc
import pytest

from bench.chaos_overload import Overload
from tests.chaos.open_loop import Flood, Outcome

OK, FULL, LATE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


def flood(answered: int, *, refused_ms: float = 2.0, late: int = 0) -> Flood:
    """Over ten seconds, all sent within the last nine of them."""
    found = Flood(10.0, 100.0)
    found.outcomes = [Outcome(0.0, 0.5, OK, "critical")]
    found.outcomes += [Outcome(1.0 + 8.0 * number / answered, 0.5, OK, "critical") for number in range(answered)]
    found.outcomes += [Outcome(2.0, refused_ms / 1000, FULL, "critical", 200) for _ in range(50)]
    found.outcomes += [Outcome(2.0, 2.0, LATE, "critical") for _ in range(late)]
    return found


def judged(name: str, found: Flood, peak: float) -> Overload:
    pool: Any = None
    run = Overload(pool, "", argparse.Namespace(seconds=10.0, seed=1))
    run._judge(name, found, peak)
    return run


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (flood(450), []),
        (flood(400), ["2x goodput: 0.89"]),
        (flood(450, refused_ms=12.0), ["2x reject p99: 12.0 ms"]),
    ],
)
def test_goals_are_held_to_the_peak(found: Flood, missed: list[str]) -> None:
    assert judged("2x", found, 50.0).missed == missed


def test_what_is_offered_for_the_peak_is_not_compared_with_it() -> None:
    assert judged("1x", flood(300), 50.0).missed == []


def test_figures_count_what_became_of_the_requests() -> None:
    figures = {metric: value for metric, _, value in judged("5x", flood(450, late=7), 50.0).figures["5x"]}
    assert (figures["offered"], figures["answered"], figures["late"]) == (508, 451, 7)
    assert figures["goodput_share"] == pytest.approx(1.0, abs=0.01)
