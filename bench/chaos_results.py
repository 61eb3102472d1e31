"""How a chaos benchmark's figures become rows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.results_file import Results, cpu_name
from tests.chaos.campaign import percentile

Figure = tuple[str, str, float]
"""Metric, unit, value."""


def chaos_results(name: str, *, is_right: bool, seed: int | None, gpu: str = "") -> Results:
    """An empty result."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return Results(
        bench=f"chaos_{name}",
        hardware=", ".join(filter(None, (gpu, cpu_name()))),
        correctness={"all_right": is_right, **({} if seed is None else {"seed": seed})},
        extra={"load_average": load},
    )


def gap_figures(moved_s: Sequence[float], stayed_s: Sequence[float], *, num_moved: int) -> list[Figure]:
    """How long answers paused that went on elsewhere, and how long the others did; from seconds."""
    return [
        ("moved", "answers", num_moved),
        ("gap_p50_ms", "ms", 1000 * percentile(moved_s, 0.5)),
        ("gap_p99_ms", "ms", 1000 * percentile(moved_s, 0.99)),
        ("unmoved_gap_p99_ms", "ms", 1000 * percentile(stayed_s, 0.99)),
    ]


def add_figures(
    results: Results, figures: list[Figure], *, model: str = "script", scope: str = "router", note: str | None = None
) -> None:
    """A row for each."""
    for metric, unit, value in figures:
        rounded = int(value) if unit == "answers" else round(value, 2 if unit in {"ratio", "nats", "share"} else 1)
        results.add(system="graphpool", model=model, metric=metric, unit=unit, value=rounded, scope=scope, note=note)
