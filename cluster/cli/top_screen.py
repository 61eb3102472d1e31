"""What `graphpool top` shows: the pool as a whole, its last minute, and a line for each replica."""

from __future__ import annotations

from collections import deque

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.load_table import duration, load_table
from cluster.client import PoolStatus
from cluster.pool_totals import PoolTotals

HISTORY = 60
BARS = "▁▂▃▄▅▆▇█"


class TopScreen:
    """Keeps the last readings."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._last: PoolStatus | None = None

    def show(self, pool: PoolStatus) -> RenderableType:
        """The screen for a new reading."""
        self._last = pool
        totals = PoolTotals.of(pool.replicas)
        self._rates.append(totals.tokens_per_s)
        return Group(*self._head(pool, totals), Text(), self._replicas(pool))

    def show_error(self, reason: str) -> RenderableType:
        """The last reading, and that there is no newer one."""
        note = Text(f"{self.address} does not answer: {reason}", "red")
        return note if self._last is None else Group(note, Text(), self._replicas(self._last))

    def _head(self, pool: PoolStatus, totals: PoolTotals) -> list[Text]:
        server = pool.server
        who = Text(f"{server.role} {server.id} at {self.address}, up {duration(server.uptime_s)}", "bold")
        busy = Text(
            f"{totals.num_ready}/{totals.num_replicas} replicas ready   {totals.running} running   "
            f"{totals.waiting} waiting   oldest {totals.queue_age_s:.1f} s   "
            f"next first token in {1e3 * totals.predicted_ttft_s:.0f} ms"
        )
        shares = Text(
            f"steps from graphs {_percent(totals.graph_share)}   prompt cached {_percent(totals.cache_share)}"
        )
        rate = Text(f"{totals.tokens_per_s:8.1f} tok/s  ")
        rate.append(sparkline(list(self._rates)), "green")
        return [who, busy, shares, rate]

    @staticmethod
    def _replicas(pool: PoolStatus) -> RenderableType:
        return load_table(pool.replicas) if pool.replicas else Text("no replica is known", "yellow")


def sparkline(values: list[float]) -> str:
    """One bar a value, the largest as high as a line."""
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] if top > 0 else BARS[0] for value in values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
