"""A memory plan, and what was measured, as tables for people and as plain values for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli.byte_sizes import show_bytes

if TYPE_CHECKING:
    from worker.capture_forecast import GraphLine
    from worker.memory_measure import MeasuredMemory
    from worker.memory_plan import MemoryPlan


def plan_report(plan: MemoryPlan, measured: MeasuredMemory | None = None) -> Group:
    """The parts of the memory, the sequences that fit, and every graph."""
    parts: list[RenderableType] = [Text(_title(plan)), parts_table(plan, measured), Text(_room(plan))]
    if plan.graphs is not None:
        parts += [Text(), graph_table(plan, measured), Text(_graph_summary(plan))]
    if not plan.fits:
        parts.append(Text("A worker could not start like this: the KV pool must hold one longest sequence.", "red"))
    return Group(*parts)


def parts_table(plan: MemoryPlan, measured: MeasuredMemory | None) -> Table:
    """One line for each part of the GPU's memory."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("part", "bytes", "", *(() if measured is None else ("measured", "error"))):
        table.add_column(title, justify="left" if title == "part" else "right", no_wrap=True)
    for name, (expected, actual) in _parts(plan, measured).items():
        more = () if measured is None else (_count(actual), _error(expected, actual))
        table.add_row(name, f"{expected:,}", show_bytes(expected), *more)
    return table


def graph_table(plan: MemoryPlan, measured: MeasuredMemory | None) -> Table:
    """One line for each key, in the order of capture."""
    assert plan.graphs is not None
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("graph", no_wrap=True)
    for title in ("alone", "adds", *(() if measured is None else ("measured", "instantiate ms"))):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for line in plan.graphs.lines:
        cells = ["-" if line.order is None else str(line.order), str(line.key), show_bytes(line.alone_bytes)]
        cells.append(show_bytes(line.added_bytes) if line.fits else "-")
        if measured is not None:
            cells += _measured_cells(line, measured)
        table.add_row(*cells, "" if line.fits else f"does not fit: {line.reason}", style="" if line.fits else "yellow")
    return table


def plan_values(plan: MemoryPlan, measured: MeasuredMemory | None = None) -> dict[str, Any]:
    """Plain values of the plan, and of the measurement."""
    values: dict[str, Any] = {
        "model": plan.model,
        "implementation": plan.implementation,
        "dtype": plan.dtype,
        "gpu_bytes": plan.gpu_bytes,
        "context_bytes": plan.context_bytes,
        "weights_bytes": plan.weights_bytes,
        "stored_bytes": dict(plan.stored_bytes),
        "kv_bytes": plan.kv.num_bytes,
        "kv_blocks": plan.kv.num_blocks,
        "kv_block_bytes": plan.kv.block_bytes,
        "kv_tokens": plan.kv.num_tokens,
        "inputs_bytes": plan.inputs_bytes,
        "graph_bytes": plan.graph_bytes,
        "used_bytes": plan.used_bytes,
        "fits": plan.fits,
        "tiers": list(plan.shapes.tiers.lengths),
        "buckets": list(plan.shapes.buckets.sizes),
        "prefill_buckets": list(plan.shapes.prefill_buckets.sizes),
        "sequences_by_tier": {str(tier): count for tier, count in plan.kv.sequences.items()},
        "graphs": [] if plan.graphs is None else [_graph_values(line, measured) for line in plan.graphs.lines],
    }
    if measured is not None:
        values["measured"] = {
            "weights_bytes": measured.weights_bytes,
            "kv_bytes": measured.kv_bytes,
            "kv_blocks": measured.num_blocks,
            "inputs_bytes": measured.inputs_bytes,
            "graph_bytes": measured.graph_bytes,
            "graph_device_bytes": measured.graph_device_bytes,
            "context_bytes": measured.context_bytes,
            "used_bytes": measured.used_bytes,
            "capture_s": measured.capture_s,
            "dropped": {str(key): reason for key, reason in measured.dropped.items()},
        }
    return values


def _graph_values(line: GraphLine, measured: MeasuredMemory | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "key": str(line.key),
        "phase": line.key.phase,
        "tier": line.key.tier,
        "bucket": line.key.bucket,
        "variant": line.key.variant,
        "order": line.order,
        "alone_bytes": line.alone_bytes,
        "added_bytes": line.added_bytes,
        "fits": line.fits,
        "reason": line.reason,
    }
    found = None if measured is None else measured.graphs.get(line.key)
    if found is not None:
        values |= {
            "measured_added_bytes": found.added_bytes,
            "measured_pool_bytes": found.pool_bytes,
            "instantiate_ms": 1e3 * found.instantiate_s,
        }
    return values


def _parts(plan: MemoryPlan, measured: MeasuredMemory | None) -> dict[str, tuple[int, int | None]]:
    """Expected and measured bytes by name."""
    expected = {
        "weights": plan.weights_bytes,
        "KV pool": plan.kv.num_bytes,
        "static inputs": plan.inputs_bytes,
        "graphs": plan.graph_bytes,
        "CUDA context, workspaces": plan.context_bytes,
        "in all": plan.used_bytes,
    }
    if measured is None:
        return {name: (num_bytes, None) for name, num_bytes in expected.items()}
    actual = (
        measured.weights_bytes,
        measured.kv_bytes,
        measured.inputs_bytes,
        measured.graph_bytes,
        _rest(measured),
        measured.used_bytes,
    )
    return {name: (expected[name], found) for name, found in zip(expected, actual, strict=True)}


def _rest(measured: MeasuredMemory) -> int:
    known = measured.weights_bytes + measured.kv_bytes + measured.inputs_bytes + measured.graph_device_bytes
    return measured.used_bytes - known


def _title(plan: MemoryPlan) -> str:
    stored = ", ".join(f"{show_bytes(size)} {dtype}" for dtype, size in plan.stored_bytes.items())
    on_disk = f", stored as {stored}" if stored else ""
    return f"{plan.model}: {plan.implementation} model in {plan.dtype}{on_disk}; a GPU of {show_bytes(plan.gpu_bytes)}"


def _room(plan: MemoryPlan) -> str:
    kv = plan.kv
    each = ", ".join(f"{count} of {tier:,}" for tier, count in kv.sequences.items())
    left = max(plan.gpu_bytes - plan.used_bytes, 0)
    return (
        f"{kv.num_blocks:,} KV blocks of {kv.block_size} tokens, {show_bytes(kv.block_bytes)} each: "
        f"{kv.num_tokens:,} tokens at once, or sequences: {each}. Left on the GPU: {show_bytes(left)}."
    )


def _graph_summary(plan: MemoryPlan) -> str:
    assert plan.graphs is not None
    fit = sum(line.fits for line in plan.graphs.lines)
    return (
        f"{fit} of {len(plan.graphs.lines)} graphs fit: {show_bytes(plan.graphs.pool_bytes)} of pool and "
        f"{show_bytes(plan.graphs.executable_bytes)} of executables. What does not fit runs eagerly."
    )


def _measured_cells(line: GraphLine, measured: MeasuredMemory) -> list[str]:
    found = measured.graphs.get(line.key)
    if found is None:
        return [f"none: {measured.dropped.get(line.key, 'not captured')}", "-"]
    return [show_bytes(found.added_bytes), f"{1e3 * found.instantiate_s:.1f}"]


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _error(expected: int, actual: int | None) -> str:
    return "-" if not actual else f"{100 * (expected - actual) / actual:+.1f} %"
