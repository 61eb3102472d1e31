"""From a result file to tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.soak_table import soak
from bench.table_cells import MIB, Document, cell_of, label_of, shown, value_of
from bench.table_cells import by_note as by_note
from bench.table_cells import markdown as markdown

_SYSTEMS = {
    "hf_eager": "transformers",
    "hf_static_graph": "transformers, StaticCache in a graph",
    "graphpool_eager": "graphpool without graphs",
    "graphpool": "graphpool",
    "vllm": "vLLM",
}


def tables_of(document: Document) -> str:
    """Every table of one benchmark, and under them where the figures come from."""
    make = _TABLES.get(document["bench"], comparison)
    return f"{make(document)}\n\n{origin(document)}"


def origin(document: Document) -> str:
    """Hardware, date, versions and command of a result."""
    versions = document["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "vllm") if name in versions)
    return f"{document['hardware']}, {document['date'][:10]}, {shown}: `{document['command']}`"


def comparison(document: Document) -> str:
    """Systems side by side: one line for each model, metric, batch and context."""
    systems = list(dict.fromkeys(row["system"] for row in document["rows"]))
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in document["rows"]:
        place = tuple(row.get(name) for name in ("model", "metric", "batch", "context", "scope", "note"))
        lines.setdefault(place, {})[row["system"]] = row
    columns = ("model", "metric", "batch", "context", "scope", "note")
    used = [index for index, _ in enumerate(columns) if any(place[index] is not None for place in lines)]
    head = [*(columns[index] for index in used), *systems]
    body = [
        [*(cell_of(place[index]) for index in used), *(value_of(found.get(system)) for system in systems)]
        for place, found in lines.items()
    ]
    return markdown(head, body, numbers=len(systems))


def graph_keys(document: Document) -> str:
    """One column for each run, one line for each total; then the slowest executables."""
    runs = list(document["keys"])
    metrics = list(dict.fromkeys(row["metric"] for row in document["rows"]))
    values = {(row["metric"], row["note"]): row for row in document["rows"]}
    totals = markdown(
        ["", *runs], [[label_of(metric), *(value_of(values.get((metric, run))) for run in runs)] for metric in metrics],
        numbers=len(runs),
    )  # fmt: skip
    steady = [
        f"{run}: {found['steps']} steps, hit rate {100 * found['hit_rate']:.1f} %, {found['allocations']} allocations."
        for run, found in document["correctness"].items()
        if "steps" in found
    ]
    dropped = [
        f"{run}: dropped {', '.join(found['keys_dropped'])}."
        for run, found in document["correctness"].items()
        if found.get("keys_dropped")
    ]
    return "\n\n".join([totals, *steady, *dropped])


def ratios(document: Document) -> str:
    """The ratios of a run; over 1, the first way is faster."""
    rows = [row for row in document["rows"] if row["unit"] == "ratio" and row["metric"] != "key_eager_over_graph"]
    body = [
        [
            row["model"],
            row["system"],
            cell_of(row.get("batch")),
            row.get("note") or label_of(row["metric"]),
            value_of(row),
        ]
        for row in rows
    ]
    table = markdown(["model", "way", "batch", "ratio", ""], body, numbers=1)
    keys = [row for row in document["rows"] if row["metric"] == "key_eager_over_graph"]
    if not keys:
        return table
    slower = [row["note"] for row in keys if row["value"] < 1]
    named = f"slower than eager: {', '.join(slower)}" if slower else "none is slower than eager"
    return f"{table}\n\nOf {len(keys)} keys, {named}."


def graph_vs_eager(document: Document) -> str:
    """Decode steps and first tokens, each system in its column; what graphpool takes includes its host's work."""
    return "\n\n".join(
        _side_by_side(document, metric, second, {"graphpool": "replica", "graphpool_eager": "replica"})
        for metric, second in (("decode_step_ms", "batch"), ("ttft_ms", "context"))
    )


def side_by_side(document: Document) -> str:
    """graphpool beside its peers, as libraries: steps, bursts, first tokens."""
    scopes = dict.fromkeys(_SYSTEMS, "replica")
    metrics = [("decode_step_ms", "batch"), ("tokens_per_s", "batch"), ("ttft_ms", "context")]
    return "\n\n".join(_side_by_side(document, metric, second, scopes) for metric, second in metrics)


def replica_grpc(document: Document) -> str:
    """What a client sees, of a replica itself and through a router: one line for each batch; then first tokens alone."""
    rows = document["rows"]
    ways = list(dict.fromkeys(row["note"] for row in rows if row["metric"] == "decode_step_ms"))
    values = {(row["metric"], row.get("batch"), row.get("context"), row.get("note")): row for row in rows}
    batches = sorted({row["batch"] for row in rows if row["metric"] == "decode_step_ms"})
    metrics = ("decode_step_ms", "tokens_per_s", "burst_ttft_ms")
    body = [
        [str(batch), *(value_of(values.get((metric, batch, 128, way))) for way in ways for metric in metrics)]
        for batch in batches
    ]
    titles = [f"{name}, {way}" for way in ways for name in ("ms a token", "tokens/s", "first tokens, ms")]
    firsts = [
        f"first token of {row['context']} by itself, {row['note']}: {shown(row['value'])} ms"
        for row in rows
        if row["metric"] == "ttft_ms"
    ]
    return f"{markdown(['streams', *titles], body, numbers=len(titles))}\n\n{'; '.join(firsts)}."


def replica_start(document: Document) -> str:
    """Seconds from the start of a process: kernels to be built, or built before."""
    found = {(row["note"], row["metric"]): row for row in document["rows"]}
    metrics = {"start_to_first_token_s": "first token, s", "start_to_all_graphs_s": "all graphs, s"}
    body = [
        [note, *(value_of(found.get((note, metric))) for metric in metrics)]
        for note in dict.fromkeys(row["note"] for row in document["rows"])
    ]
    return markdown(["", *metrics.values()], body, numbers=len(metrics))


def engine_speed(document: Document) -> str:
    """One line for each batch; then what has no batch of its own."""
    rows = document["rows"]
    values = {(row["metric"], row["batch"]): row for row in rows}
    batches = sorted({row["batch"] for row in rows if row["metric"] == "decode_step_ms"})
    metrics = ("decode_step_ms", "host_step_ms", "tokens_per_s", "idle_share")
    body = [[str(batch), *(value_of(values.get((metric, batch))) for metric in metrics)] for batch in batches]
    table = markdown(
        ["rows", "step, ms", "of it the host, ms", "tokens/s of a burst", "GPU idle"], body, numbers=len(metrics)
    )
    others = [_engine_figure(row) for row in rows if row["metric"].startswith(("ttft", "token_gap"))]
    return f"{table}\n\n{'; '.join(others)}."


def _engine_figure(row: dict[str, Any]) -> str:
    name = row["metric"].replace("_", " ").removesuffix(" ms")
    of = f" of {row['context']} tokens" if "context" in row else ""
    among = f", {row['batch']} {'prompts' if of else 'rows'} {row['note']}" if "note" in row else ""
    return f"{name}{of}{among}: {shown(row['value'])} ms"


def _side_by_side(document: Document, metric: str, second: str, scopes: dict[str, str]) -> str:
    """One metric: models and batches (or contexts) down, systems across."""
    order = ("hf_eager", "hf_static_graph", "vllm", "graphpool_eager", "graphpool")
    found = {
        (row["model"], row[second], row["system"]): row
        for row in document["rows"]
        if row["metric"] == metric and row["scope"] == scopes.get(row["system"], "step")
    }
    systems = [system for system in order if any(place[2] == system for place in found)]
    lines = dict.fromkeys((model, size) for model, size, _ in found)
    body = [
        [model, str(size), *(value_of(found.get((model, size, system))) for system in systems)] for model, size in lines
    ]
    head = [label_of(metric), "prompt" if second == "context" else second, *(_SYSTEMS[system] for system in systems)]
    return markdown(head, body, numbers=len(systems))


def graph_update(document: Document) -> str:
    """The table of one run, and the choice."""
    table = {name: value for name, value in document["table"].items() if name not in ("nodes by key", "choice")}
    body = [[name, shown(value)] for name, value in table.items()]
    return f"{markdown(['', ''], body, numbers=1)}\n\n{document['table'].get('choice', '')}".rstrip()


def graph_text(document: Document) -> str:
    """What differs, with its gap."""
    found = document["correctness"]
    names = ("prompts", "same_texts", "near_ties", "unexplained", "places", "same_places", "largest_gap_turned")
    totals = markdown(
        ["", *found], [[name.replace("_", " "), *(shown(each[name]) for each in found.values())] for name in names],
        numbers=len(found),
    )  # fmt: skip
    body = [
        [dtype, str(one["prompt"]), str(one["place"]), str(one["expected"]), str(one["chosen"]), f"{one['gap']:.4f}"]
        for dtype, each in found.items()
        for one in each["differences"]
    ]
    listed = markdown(["type", "prompt", "place", "expected", "chosen", "logit gap"], body, numbers=5) if body else ""
    return f"{totals}\n\n{listed}".rstrip()


def graph_plan(document: Document) -> str:
    """Expected, measured and error of each part, for each way to run."""
    parts = {"weights": "weights_bytes", "KV pool": "kv_bytes", "graphs": "graph_bytes"}
    body = []
    for name, plan in document["plans"].items():
        for part, field in parts.items():
            expected, measured = plan[field], plan["measured"][field]
            difference = f"{100 * (expected - measured) / measured:+.1f} %" if measured else "-"
            body.append([name, part, f"{expected / MIB:,.1f}", f"{measured / MIB:,.1f}", difference])
    return markdown(["run", "part", "planned, MiB", "measured, MiB", "error"], body, numbers=3)


def decode_limit(document: Document) -> str:
    """Steps beside their floor, the kernels of single steps, and what short tiers are good for."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    tiers: dict[tuple[str, int], dict[str, float]] = {}
    for row in document["rows"]:
        if row.get("note"):
            tiers.setdefault((row["system"].removeprefix("graphpool "), row["batch"]), {})[row["note"]] = row["value"]
        else:
            name = row["system"] if row["unit"] == "ms" else row["metric"]
            found.setdefault((row["model"], row["batch"], row["context"]), {})[name] = row["value"]
    body = [
        [*map(str, place), *(shown(values[name]) for name in ("graphpool", "limit", "share_of_read_speed"))]
        for place, values in found.items()
    ]
    texts = [
        f"Memory is read at {document['read_bytes_per_s'] / 1e12:.2f} TB/s.",
        markdown(["model", "batch", "context", "step, ms", "limit, ms", "share"], body, numbers=3),
    ]
    for label, table in document.get("kernels", {}).items():
        lines = [
            [line["kernel"], str(line["launches"]), shown(line["bytes"] / MIB), f"{line['us']:.1f}", _share_of(line)]
            for line in table
        ]
        total = [
            "all",
            str(sum(line["launches"] for line in table)),
            shown(sum(line["bytes"] for line in table) / MIB),
        ]
        lines.append([*total, f"{sum(line['us'] for line in table):.1f}", ""])
        texts.append(f"{label}:\n\n" + markdown(["kernel", "launches", "MiB", "us", "share"], lines, numbers=4))
    if tiers:
        notes = list(dict.fromkeys(note for values in tiers.values() for note in values))
        lines = [
            [path, str(batch), *(shown(values[note]) for note in notes), shown(values[notes[-1]] / values[notes[0]])]
            for (path, batch), values in tiers.items()
        ]
        texts.append(markdown(["path", "batch", *(f"{note}, ms" for note in notes), "ratio"], lines, numbers=3))
    return "\n\n".join(texts)


def _share_of(line: Document) -> str:
    return shown(line["share_of_read_speed"]) if line["bytes"] else "-"


def by_metric(document: Document) -> str:
    """A line for each metric, with its unit."""
    body = []
    for row in document["rows"]:
        name = row["metric"].removesuffix(f"_{row['unit'].lower()}").replace("_", " ")
        body.append([name if name == row["unit"] else f"{name}, {row['unit']}", value_of(row)])
    return markdown(["", document["rows"][0]["model"]], body, numbers=1)


def serve(document: Document) -> str:
    """How replicas started, second by second; what clients noticed of what happened to them; what was wrong."""
    starts = [row for row in document["rows"] if row["metric"].startswith("start_")]
    phases = sorted({row["metric"] for row in starts}, key=[row["metric"] for row in starts].index)
    values = {(row["note"], row["metric"]): row for row in starts}
    notes = list(dict.fromkeys(row["note"] for row in starts))
    body = [
        [
            phase.removeprefix("start_").removesuffix("_s").replace("_", " "),
            *(value_of(values.get((note, phase))) for note in notes),
        ]
        for phase in phases
    ]
    texts = [markdown(["seconds to", *notes], body, numbers=len(notes))] if body else []
    events = [row for row in document["rows"] if not row["metric"].startswith("start_")]
    if events:
        texts.append(by_note({**document, "rows": events}))
    found = document["correctness"]
    texts += [f"{name}: {state}." for name, state in found.get("parts", {}).items() if state != "done"]
    texts += [f"Wrong: {text}." for text in found.get("wrong", [])]
    return "\n\n".join(texts)


def sampling(document: Document) -> str:
    """Steps of each kind of request by batch, and what they take over greedy ones."""
    steps = {(row["note"], row["batch"]): row["value"] for row in document["rows"] if row["metric"] == "decode_step_ms"}
    batches = sorted({batch for _, batch in steps})
    body = []
    for note in dict.fromkeys(note for note, _ in steps):
        line = [note]
        for batch in batches:
            added = f" (+{(steps[note, batch] - steps['greedy', batch]) * 1e3:.0f})" if note != "greedy" else ""
            line.append(f"{steps[note, batch] * 1e3:,.0f}{added}")
        body.append(line)
    return markdown(["step, us", *(f"batch {batch}" for batch in batches)], body, numbers=len(batches))


_TABLES: dict[str, Callable[[Document], str]] = {
    "graph_keys": graph_keys,
    "graph_vs_eager": graph_vs_eager,
    "replica_grpc": replica_grpc,
    "replica_start": replica_start,
    "side_by_side": side_by_side,
    "engine_speed": engine_speed,
    "graph_ordering": ratios,
    "graph_seeds": ratios,
    "graph_update": graph_update,
    "graph_text": graph_text,
    "graph_plan": graph_plan,
    "decode_limit": decode_limit,
    "sampling": sampling,
    "chaos_gaps": by_note,
    "chaos_gpu": by_metric,
    "chaos_gpu_fast": by_metric,
    "chaos_isolation": by_note,
    "chaos_isolation_virtual": by_note,
    "chaos_kills": by_note,
    "chaos_model": by_note,
    "chaos_overload": by_note,
    "chaos_schedules": by_note,
    "cluster_events": by_note,
    "cluster_events_model": by_note,
    "cluster_soak": soak,
    "pool": by_note,
    "serve_gpu": serve,
    "serve_two_gpus": serve,
}
