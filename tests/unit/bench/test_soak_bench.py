"""The parts of the soak that need no cluster."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from bench import soak
from bench.report_tables import tables_of
from bench.soak_trend import LIMITS, MIB, trend
from cluster.client import CallError
from cluster.client.errors import ResourceExhausted
from tests.chaos.cluster_clients import SLOW_TOKENS, Habits, Tally, Visit, mean_steps, visit
from tests.chaos.cluster_soak import Moment, Soaked, SoakPlan
from tests.chaos.cluster_vitals import Life, Reading, Vitals, metrics_ports
from tests.chaos.oracle import Outcome, Question, Record

PLAN = SoakPlan(minutes=30, warm_up_s=180)
VISIT = Visit(question=Question(prompt=(3, 4), max_tokens=8))


def record(outcome: Outcome = Outcome.COMPLETE, **changes: Any) -> Record:
    return Record(question=VISIT.question, outcome=outcome, **{"num_tokens": 8, "attempts": 1, **changes})


def life(role: str, *, rss_per_min: float = 0.0, tasks: int = 40, minutes: float = 30, begins_s: float = 0.0) -> Life:
    made = Life(role=role, process=SimpleNamespace(pid=1))  # type: ignore[arg-type]
    for number in range(int(6 * minutes)):
        rss = round(100 * MIB + rss_per_min * number / 6)
        at_s = begins_s + 10.0 * number
        made.readings.append(Reading(at_s=at_s, rss=rss, descriptors=30, threads=12, tasks=tasks, eager_steps=number))
    return made


def soaked(
    *lives: Life, tally: Tally | None = None, idle: tuple[int, int] = (9, 9), left: list[str] | None = None
) -> Soaked:
    vitals = Vitals(range(0))
    for number, one in enumerate(lives):
        vitals.lives[number] = one  # type: ignore[index]
    moments = [
        Moment(at_s=10.0 * n, gap_p50_s=0.08, gap_p99_s=0.2, occupancy=0.7, load_average=3.0, busy=0.6)
        for n in range(180)
    ]
    return Soaked(
        plan=PLAN,
        tally=tally or Tally(complete=10),
        vitals=vitals,
        moments=moments,
        whole_s=[3.0, 5.0],
        idle_tasks={"router": idle},
        left=left or [],
    )


def test_a_trend_tells_start_end_and_what_a_line_through_the_last_part_says() -> None:
    found = trend([(10.0 * n, 100.0 if n < 60 else 100.0 + n - 60) for n in range(180)], window_s=1190)
    assert found.start == 100.0
    assert found.end == pytest.approx(216, abs=1)
    assert found.growth == pytest.approx(119)
    assert found.per_hour == pytest.approx(360)
    assert len(found.by_minute) == 30


def test_one_high_reading_at_the_end_is_no_growth() -> None:
    points = [(10.0 * n, 100.0 * MIB) for n in range(179)] + [(1790.0, 110.0 * MIB)]
    assert trend(points).end == 100 * MIB
    assert LIMITS["rss"].is_flat(trend(points))


@pytest.mark.parametrize(
    ("name", "start", "growth", "flat"),
    [
        ("rss", 100 * MIB, 4.9 * MIB, True),
        ("rss", 100 * MIB, 5.1 * MIB, False),
        ("rss", 1000 * MIB, 19 * MIB, True),
        ("rss", 1000 * MIB, 21 * MIB, False),
        ("rss", 100 * MIB, -50 * MIB, True),
        ("descriptors", 30, 10, True),
        ("descriptors", 1000, 11, False),
        ("threads", 12, 11, False),
    ],
)
def test_what_counts_as_flat(name: str, start: float, growth: float, flat: bool) -> None:
    found = trend([(120.0 * n, start + growth * n / 10) for n in range(11)])
    assert LIMITS[name].is_flat(found) is flat


def test_readings_of_a_young_process_do_not_count() -> None:
    made = life("router")
    points = soak.points_of(made, lambda reading: reading.rss, 180.0)
    assert points[0][0] == 180.0


def test_of_replicas_that_are_killed_each_ones_last_reading_counts() -> None:
    lives = [life(soak.KILLED, rss_per_min=MIB, minutes=2, begins_s=60.0 * n) for n in range(3)]
    young = life(soak.KILLED, minutes=0.4, begins_s=240.0)
    assert soak.last_points([*lives, young], lambda reading: reading.threads) == [(110.0, 12), (170.0, 12), (230.0, 12)]


def test_a_flat_run_is_right() -> None:
    results = soak.results_of(soaked(life("router"), life("replica, never killed"), life(soak.KILLED, minutes=2)))
    assert results.correctness["all_right"]
    values = {(row.note, row.metric): row.value for row in results.rows}
    assert values["router", "rss_start"] == values["router", "rss_end"] == 100 * MIB
    assert values["router", "tasks_growth"] == 0
    assert values[None, "whole_p50_s"] == 4.0
    assert "captures no graphs" in results.extra["graph_hit_rate"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lives": (life("router", rss_per_min=MIB),)},
        {"lives": (life("router"), life("replica, never killed"), life("replica, never killed", rss_per_min=MIB))},
        {"idle": (9, 40)},
        {"left": ["replica-1: streams"]},
        {"tally": Tally(complete=10, lost=1)},
        {"tally": Tally(complete=10, duplicated=1)},
    ],
)
def test_a_run_that_grows_loses_or_keeps_something_fails(wrong: dict[str, Any]) -> None:
    lives = wrong.pop("lives", (life("router"),))
    assert not soak.results_of(soaked(*lives, **wrong)).correctness["all_right"]


def test_growth_of_rays_own_processes_is_told_but_is_not_ours() -> None:
    results = soak.results_of(soaked(life("router"), life("Ray's GCS", rss_per_min=MIB)))
    assert results.correctness["all_right"]
    assert {row.note: row.value for row in results.rows if row.metric == "rss_growth"}["Ray's GCS"] > 10 * MIB


def test_a_client_that_leaves_and_one_that_is_told_to_come_back_lose_nothing() -> None:
    tally = Tally()
    tally.take(VISIT, record(), has_left=False)
    tally.take(VISIT, record(Outcome.STUCK, num_tokens=3), has_left=True)
    refused = record(Outcome.FAILED, num_tokens=0, error=ResourceExhausted(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    tally.take(VISIT, refused, has_left=False)
    assert (tally.complete, tally.left, tally.refused, tally.lost, tally.tokens) == (1, 1, 1, 0, 11)
    assert tally.is_flawless


def test_an_answer_that_breaks_off_is_lost_whatever_the_status() -> None:
    tally = Tally()
    broken = record(Outcome.FAILED, error=ResourceExhausted(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    tally.take(VISIT, broken, has_left=False)
    tally.take(VISIT, record(Outcome.FAILED, error=CallError(grpc.StatusCode.INTERNAL, "x")), has_left=False)
    tally.take(VISIT, record(Outcome.STUCK), has_left=False)
    assert tally.lost == 3


def test_a_wrong_token_counts_though_its_client_left() -> None:
    tally = Tally()
    tally.take(VISIT, record(Outcome.STUCK, num_changed=1), has_left=True)
    assert not tally.is_flawless


def test_visits_are_of_every_kind_and_slow_ones_fit_what_a_router_keeps() -> None:
    draw, habits = random.Random(4), Habits()
    visits = [visit(draw, habits) for _ in range(2000)]
    slow = [one for one in visits if one.pause_s]
    leaving = [one for one in visits if one.leaves_after is not None]
    assert 0.02 < len(slow) / len(visits) < 0.045
    assert 0.025 < len(leaving) / len(visits) < 0.06
    assert all(one.question.max_tokens <= SLOW_TOKENS < 256 for one in slow)
    lengths = [one.question.max_tokens for one in visits]
    assert min(lengths) < 15
    assert max(lengths) > 400


def test_clients_come_at_the_share_of_the_capacity_that_is_asked_for() -> None:
    plan = SoakPlan(occupancy=0.7, replicas=4, rows=8, step_s=0.1)
    assert plan.rate_per_s * mean_steps(plan.habits) == pytest.approx(0.7 * 320)


@pytest.mark.parametrize(
    "wrong",
    [{"minutes": 0.0}, {"occupancy": 1.1}, {"kept": 4}, {"kept": 0}, {"warm_up_s": 1800.0}, {"kill_every_s": 0.0}],
)
def test_a_soak_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        SoakPlan(**wrong)


def test_ports_for_metrics_are_next_to_each_other() -> None:
    ports = metrics_ports()
    assert len(ports) == 16
    assert ports.step == 1


def test_the_table_has_the_totals_and_a_line_for_each_value() -> None:
    tally = Tally(complete=1234, gaps_s=array("f", [0.08] * 10))
    results = soak.results_of(soaked(life("router"), tally=tally))
    document = {
        "bench": "cluster_soak",
        "versions": {},
        "hardware": "h",
        "date": "2026-01-01",
        "command": "c",
        "rows": [
            {k: getattr(row, k) for k in ("metric", "unit", "value", "note") if getattr(row, k) is not None}
            for row in results.rows
        ],
        **results.extra,
    }
    text = tables_of(document)
    assert "| complete, answers |" in text
    assert "| 1,234 |" in text
    assert "| gap p50, ms |" in text
    assert "| router | 100 MiB to 100 MiB | 30 to 30 | 12 to 12 | 40 to 40 | 0 MiB | 0 MiB |" in text
    assert "gap p99, of every 10 s: 200 to 200 ms" in text
