from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cluster.metrics.replica import ReplicaMetrics
from cluster.metrics.router import RouterMetrics
from worker.load import LoadSnapshot

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "graphpool.json"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def exported() -> set[str]:
    families = [*RouterMetrics().families([], 0), *ReplicaMetrics().families(LoadSnapshot())]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def test_every_metric_of_the_dashboard_is_exported() -> None:
    asked = {
        name
        for one in dashboard()["panels"]
        for t in one["targets"]
        for name in re.findall(r"graphpool_\w+", t["expr"])
    }
    assert len(asked) > 15
    assert asked <= exported()


def test_panels_have_titles_units_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
