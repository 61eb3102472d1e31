"""What tables in Markdown are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
Cells = Sequence[Sequence[str]]

MIB = 1 << 20
LABELS = {
    "decode_step_ms": "decode step, ms",
    "ttft_ms": "first token, ms",
    "tokens_per_s": "tokens/s",
    "launches": "launches of a step",
    "graph_bytes": "graph memory, MiB",
    "capture_s": "capture, s",
}


def by_note(document: Document) -> str:
    """A line for each note and a column for each metric, with its unit."""
    units = {row["metric"]: row["unit"] for row in document["rows"]}
    lines: dict[str, dict[str, Document]] = {}
    for row in document["rows"]:
        lines.setdefault(row.get("note", ""), {})[row["metric"]] = row
    names = {metric: metric.removesuffix(f"_{unit.lower()}").replace("_", " ") for metric, unit in units.items()}
    head = [name if name == units[metric] else f"{name}, {units[metric]}" for metric, name in names.items()]
    body = [[note, *(value_of(found.get(metric)) for metric in units)] for note, found in lines.items()]
    if list(lines) == [""]:
        return markdown(head, [line[1:] for line in body], numbers=len(units))
    return markdown(["", *head], body, numbers=len(units))


def markdown(head: Sequence[str], body: Cells, *, numbers: int) -> str:
    """A table whose last `numbers` columns are flush right."""
    left = len(head) - numbers
    rule = ["---" if index < left else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def value_of(row: Document | None) -> str:
    if row is None:
        return "-"
    value = row["value"] / MIB if row["unit"] == "B" else row["value"]
    return shown(value) + (" MiB" if row["unit"] == "B" else "")


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cell_of(value: Any) -> str:
    return "" if value is None else label_of(value) if isinstance(value, str) else str(value)


def label_of(metric: str) -> str:
    return LABELS.get(metric, metric)
