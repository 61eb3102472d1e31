from __future__ import annotations

import io

from rich.console import Console, RenderableType

from cluster.cli.top_screen import HISTORY, TopScreen, sparkline
from cluster.client import PoolStatus
from cluster.pool_totals import PoolTotals
from protos import control_pb2


def replica(name: str, state: int = control_pb2.REPLICA_STATE_READY, **load: float) -> control_pb2.ReplicaLoad:
    return control_pb2.ReplicaLoad(replica=name, state=state, load=control_pb2.Load(total_blocks=10, **load))  # type: ignore[arg-type]


def pool(*replicas: control_pb2.ReplicaLoad) -> PoolStatus:
    return PoolStatus(server=control_pb2.ServerInfo(role="router", id="r-1", uptime_s=65), replicas=replicas)


def text(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_totals_are_sums_and_the_worst_wait() -> None:
    totals = PoolTotals.of(
        [
            replica("a", running=3, waiting=1, tokens_per_s=10, queue_age_s=2, graph_replays=90, eager_steps=10,
                    predicted_ttft_s=0.4),
            replica("b", running=1, tokens_per_s=5.5, queue_age_s=7, predicted_ttft_s=0.1, prefix_cache_queries=8,
                    prefix_cache_hits=2),
            replica("c", control_pb2.REPLICA_STATE_FAILED),
        ]
    )  # fmt: skip
    assert (totals.num_ready, totals.num_replicas, totals.running, totals.waiting) == (2, 3, 4, 1)
    assert totals.tokens_per_s == 15.5
    assert totals.queue_age_s == 2  # nobody waits at b
    assert totals.predicted_ttft_s == 0.1
    assert (totals.graph_share, totals.cache_share) == (0.9, 0.25)


def test_a_pool_without_replicas_has_no_shares() -> None:
    totals = PoolTotals.of([])
    assert (totals.graph_share, totals.cache_share, totals.predicted_ttft_s) == (None, None, 0.0)
    assert "no replica is known" in text(TopScreen("host:1").show(pool()))


def test_the_screen_shows_the_pool_its_last_minute_and_each_replica() -> None:
    screen = TopScreen("host:1")
    for rate in range(HISTORY + 9):
        shown = text(screen.show(pool(replica("replica-7", running=2, tokens_per_s=rate, graph_replays=1))))
    assert "router r-1 at host:1, up 1 min 5 s" in shown
    assert "1/1 replicas ready   2 running" in shown
    assert "steps from graphs 100.0 %" in shown
    assert "replica-7" in shown
    assert sum(shown.count(bar) for bar in "▁▂▃▄▅▆▇█") == HISTORY


def test_a_router_that_goes_away_leaves_the_last_reading_on_the_screen() -> None:
    screen = TopScreen("host:1")
    assert text(screen.show_error("gone")).strip() == "host:1 does not answer: gone"
    screen.show(pool(replica("replica-7")))
    shown = text(screen.show_error("gone"))
    assert "does not answer" in shown
    assert "replica-7" in shown


def test_bars_grow_with_the_values() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
