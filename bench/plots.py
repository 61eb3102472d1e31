"""From a result file to one picture beside it. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Document = dict[str, Any]
GIB = 1 << 30


def plot(document: Document, folder: Path) -> Path | None:
    """Draw `folder/<bench>.png`; None where there is nothing to draw."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = _PLOTS.get(document["bench"], bars)(document)
    if figure is None:
        return None
    path = folder / f"{document['bench']}.png"
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    return path


def bars(document: Document) -> Any:
    """The first metric in milliseconds that several systems share: a group a model and batch, a bar a system."""
    rows = [row for row in document["rows"] if row["unit"] == "ms"]
    shared = [
        row["metric"] for row in rows if len({each["system"] for each in rows if each["metric"] == row["metric"]}) > 1
    ]
    if not shared:
        return None
    rows = [row for row in rows if row["metric"] == shared[0]]
    groups = list(dict.fromkeys((row["model"], row.get("batch"), row.get("context")) for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure, axes = _axes(
        width=max(6.0, 1.1 * len(groups)), title=f"{document['bench']}: {shared[0]}", document=document
    )
    for number, system in enumerate(systems):
        found = {(r["model"], r.get("batch"), r.get("context")): r["value"] for r in rows if r["system"] == system}
        places = [index + 0.8 * number / len(systems) for index, group in enumerate(groups) if group in found]
        axes.bar(places, [found[g] for g in groups if g in found], 0.8 / len(systems), label=system, align="edge")
    labels = ["\n".join(str(part) for part in group if part is not None) for group in groups]
    axes.set_xticks([index + 0.4 for index in range(len(groups))], labels, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend(fontsize=7)
    return figure


def ratio_bars(document: Document) -> Any:
    """Every ratio but those of single keys, with a line at 1."""
    rows = [row for row in document["rows"] if row["unit"] == "ratio" and row["metric"] != "key_eager_over_graph"]
    if not rows:
        return None
    names = [f"{r['model']} b{r.get('batch', '')}: {r.get('note') or r['metric']} ({r['system']})" for r in rows]
    figure, axes = _axes(height=0.5 + 0.28 * len(rows), title=document["bench"], document=document)
    axes.barh(range(len(rows)), [row["value"] for row in rows])
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    for index, row in enumerate(rows):
        axes.text(row["value"], index, f" {row['value']:.2f}", va="center", fontsize=7)
    return figure


def key_memory(document: Document) -> Any:
    """Memory of each key in a pool of its own, expected and measured, for the runs that have such pools."""
    runs = {
        run: lines
        for run, lines in document["keys"].items()
        if "private" in run and any(line.get("pool_bytes") for line in lines.values())
    }
    if not runs:
        return None
    figure, axes = _axes(width=7.0, title="graph_keys: memory of a key by itself", document=document)
    for run, lines in runs.items():
        found = [line for line in lines.values() if line.get("pool_bytes")]
        expected = [line["expected_alone_bytes"] / GIB for line in found]
        axes.scatter(expected, [line["pool_bytes"] / GIB for line in found], s=12, label=run)
    largest = max(line["expected_alone_bytes"] for lines in runs.values() for line in lines.values()) / GIB
    axes.plot([1e-3, largest], [1e-3, largest], color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("expected, GiB")
    axes.set_ylabel("measured, GiB")
    axes.legend(fontsize=7)
    return figure


def shares_by_context(document: Document) -> Any:
    """How much of the read speed steps reach, a line a model and batch."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in document["rows"]:
        if row["metric"] == "share_of_read_speed":
            found.setdefault(f"{row['model']}, batch {row['batch']}", []).append((row["context"], row["value"]))
    if not found:
        return None
    figure, axes = _axes(title="decode_limit: share of the memory's read speed", document=document)
    for label, points in found.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel("context, tokens")
    axes.legend(fontsize=7)
    return figure


def pool_growth(document: Document) -> Any:
    """What a pool gives, and how long a first token takes, by its number of replicas."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in document["rows"]:
        found.setdefault(row["metric"], []).append((int(row["note"].split()[0]), row["value"]))
    figure, axes = _axes(title="pool: tokens/s and first tokens behind one router", document=document)
    for metric, style, label in (("asked_tokens_per_s", "--", "asked for"), ("tokens_per_s", "-", "answered")):
        axes.plot(*zip(*found[metric], strict=True), style, marker="o", markersize=3, color="tab:blue", label=label)
    axes.set_xticks([replicas for replicas, _ in found["tokens_per_s"]])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas")
    axes.set_ylabel("tokens/s")
    times = axes.twinx()
    for metric, style in (("ttft_p50_ms", "-"), ("ttft_p99_ms", ":")):
        label = f"first token, {metric.removeprefix('ttft_').removesuffix('_ms')}"
        times.plot(*zip(*found[metric], strict=True), style, marker="s", markersize=3, color="tab:red", label=label)
    times.set_ylim(bottom=0)
    times.set_ylabel("ms")
    figure.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=4)
    return figure


def _axes(*, document: Document, title: str, width: float = 8.0, height: float = 4.0) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set_title(f"{title}\n{document['hardware']}, {document['date'][:10]}", fontsize=9)
    return figure, axes


_PLOTS: dict[str, Callable[[Document], Any]] = {
    "decode_limit": shares_by_context,
    "graph_keys": key_memory,
    "graph_ordering": ratio_bars,
    "graph_seeds": ratio_bars,
    "pool": pool_growth,
}
