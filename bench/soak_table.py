"""The tables of a soak."""

from __future__ import annotations

from bench.table_cells import Document, by_note, markdown, value_of


def soak(document: Document) -> str:
    """The totals of a long run, times apart from counts; then how what each process holds began, ended and grew."""
    totals = [row for row in document["rows"] if "note" not in row]
    times = [row for row in totals if row["unit"] in ("ms", "s")]
    parts: dict[str, dict[str, Document]] = {}
    for row in document["rows"]:
        if "note" in row:
            parts.setdefault(row["note"], {})[row["metric"]] = row
    gaps = [note for note in parts if note.startswith("gap")]
    body = [
        [note, *(_from_to(found, name) for name in ("rss", "descriptors", "threads", "tasks")), *_growths(found)]
        for note, found in parts.items()
        if note not in gaps
    ]
    said = [f"{note}: {_from_to(parts[note], 'ms')} ms" for note in gaps]
    said += [f"{name.replace('_', ' ')}: {value:g}" for name, value in document["machine"].items()]
    head = ["", "memory", "descriptors", "threads", "tasks", "memory's growth", "an hour"]
    tables = [
        by_note({"rows": [row for row in totals if row not in times]}),
        by_note({"rows": times}),
        markdown(head, body, numbers=len(head) - 1),
    ]
    return "\n\n".join([*tables, f"{'; '.join(said)}."])


def _from_to(found: dict[str, Document], name: str) -> str:
    start, end = (found.get(f"{name}_{part}") for part in ("start", "end"))
    return "-" if start is None or end is None else f"{value_of(start)} to {value_of(end)}"


def _growths(found: dict[str, Document]) -> list[str]:
    return [value_of(found.get(name)) for name in ("rss_growth", "rss_per_hour")]
