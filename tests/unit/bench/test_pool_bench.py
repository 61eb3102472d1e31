"""The parts of the pool bench that need no pool, and the whole of it, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plots import plot
from bench.pool import Plan, Point, measure_point, results_of
from bench.pool_clients import Seen, arrivals

PLAN = Plan(rows=10, step_ms=20, tokens=50, occupancy=0.5)


def point(replicas: int, *, wrong: int = 0, failed: dict[str, int] | None = None) -> Point:
    seen = Seen(
        due=100 * replicas,
        tokens=1000 * replicas,
        first_token_s=[0.01, 0.02, 0.5],
        answers=20,
        wrong=wrong,
        failed=failed or {},
    )
    return Point(
        replicas=replicas, seen=seen, seconds=10.0, router_cpu_s=0.5 * replicas, busy=0.4, asked_tokens=5000 * replicas
    )


def test_the_rate_is_a_share_of_what_all_replicas_can_give() -> None:
    assert PLAN.replica_tokens_per_s == 500
    assert PLAN.rate_per_s(4) == 0.5 * 4 * 500 / 50


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"step_ms": 0.0}, {"seconds": -1.0}, {"replicas": ()}, {"replicas": (1, 0)}, {"occupancy": 1.5}],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        Plan(**wrong)  # type: ignore[arg-type]


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_for_a_seed() -> None:
    found = arrivals(50.0, 100.0, 140.0, seed=3)
    assert found == arrivals(50.0, 100.0, 140.0, seed=3) != arrivals(50.0, 100.0, 140.0, seed=4)
    assert found == sorted(found)
    assert 100.0 < found[0] < found[-1] < 140.0
    assert len(found) == pytest.approx(2000, rel=0.1)


def test_what_processes_of_clients_saw_adds_up() -> None:
    total = Seen(failed={"UNAVAILABLE": 1})
    total.add(Seen(due=2, tokens=3, first_token_s=[0.1], answers=1, wrong=1, failed={"UNAVAILABLE": 2, "INTERNAL": 1}))
    assert (total.due, total.tokens, total.answers, total.wrong) == (2, 3, 1, 1)
    assert total.failed == {"UNAVAILABLE": 3, "INTERNAL": 1}
    assert total.first_token_ms(0.99) == 100
    assert Seen().first_token_ms(0.5) == 0


def test_a_size_of_the_pool_is_a_line_with_the_routers_share_and_limit() -> None:
    results = results_of(PLAN, [point(1), point(2)], load_average="1")
    two = {row.metric: row.value for row in results.rows if row.note == "2 replicas"}
    assert two["tokens_per_s"] == 200
    assert two["asked_tokens_per_s"] == 1000
    assert (two["ttft_p50_ms"], two["ttft_p99_ms"]) == (20.0, 500.0)
    assert two["router_share"] == 0.1
    assert two["router_tokens_per_s_per_core"] == 2000
    assert results.correctness["passed"]


@pytest.mark.parametrize("bad", [point(1, wrong=1), point(1, failed={"UNAVAILABLE": 1})])
def test_an_answer_that_is_wrong_or_not_given_fails_the_bench(bad: Point) -> None:
    assert not results_of(PLAN, [point(2), bad], load_average="1").correctness["passed"]


def test_the_picture_shows_throughput_and_first_tokens_by_replicas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = results_of(PLAN, [point(1), point(2), point(4)], load_average="1").write(tmp_path)
    import json

    picture = plot(json.loads(path.read_text()), tmp_path)
    assert picture == tmp_path / "pool.png"
    assert picture.stat().st_size > 5000


async def test_a_small_pool_gives_every_answer() -> None:
    found = await measure_point(Plan(rows=4, step_ms=20, tokens=10, occupancy=0.3, clients=1, seconds=1.0), 2)
    assert found.seen.answers > 0
    assert (found.seen.wrong, found.seen.failed) == (0, {})
    assert found.seen.tokens > 0
    assert found.router_cpu_s > 0
