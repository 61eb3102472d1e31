"""The plan of a worker's memory against the worker itself: weights, KV pool, every graph.

    python -m bench.graph_plan [--model llama-3.2-1b] [--kernels auto,torch]

What `graphpool plan --measure` shows, for one pool of graph memory and for a pool of each graph's own; there every line
stands by itself. The goal: weights and KV pool within 1 %, graph memory within 30 %.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

from bench.engine_runs import TINY_CHANGES, attempt, free_memory, hardware, parser
from bench.options import parse_for_gpu, some_of
from bench.results_file import Results
from bench.shapes import SHAPES, TINY, write_config
from worker.config import Device, Kernels, WorkerConfig
from worker.memory_measure import MeasuredMemory, measure_memory
from worker.memory_plan import MemoryPlan, plan_memory

TINY_GPU_BYTES = 8 << 30
MIB = 1 << 20
LIMITS = {"weights": 0.01, "kv": 0.01, "graphs": 0.30, "lines": 0.30}


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    options.add_argument("--kernels", type=some_of(get_args(Kernels)), default="auto,torch")
    options.add_argument("--max-model-len", type=int, default=8192)
    args = parse_for_gpu(options, arguments)
    results = Results(bench="graph_plan", hardware=hardware(args.device))
    for kernels in args.kernels:
        for pool in (True, False):
            name = f"{kernels}, {'one pool' if pool else 'own pools'}"
            found = attempt(compare, args, kernels, pool, results, name)
            results.correctness[name] = found
            print(name, found, flush=True)
            free_memory()
    return results.write(args.out)


def compare(args: Any, kernels: str, pool: bool, results: Results, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args.model, args.device, Path(folder), args.max_model_len, kernels, pool)
        measured = measure_memory(config)
        plan = plan_memory(config, measured.gpu_bytes or TINY_GPU_BYTES)
    show(plan, measured)
    results.extra.setdefault("plans", {})[name] = values(plan, measured)
    lines = line_errors(plan, measured)
    errors = {
        "weights": error(plan.weights_bytes, measured.weights_bytes),
        "kv": error(plan.kv.num_bytes, measured.kv_bytes),
        "graphs": error(plan.graph_bytes, measured.graph_bytes),
        "used": error(plan.used_bytes, measured.used_bytes),
    }
    if not pool and lines:
        errors["lines"] = max(lines.values(), key=abs)
    for part, value in errors.items():
        results.add(
            system="graphpool",
            model=args.model,
            metric=f"{part}_error",
            unit="ratio",
            value=value,
            scope="replica",
            note=name,
        )
    return errors | {
        "within_limits": all(abs(errors[part]) <= limit for part, limit in LIMITS.items() if part in errors),
        "line_error_median": median(map(abs, lines.values())) if lines else 0.0,
        "lines_over_limit": {key: value for key, value in lines.items() if abs(value) > LIMITS["lines"]},
        "graph_bytes": measured.graph_bytes,
        "graph_pool_bytes": sum(key.pool_bytes for key in measured.graphs.values()),
        "graph_device_bytes": measured.graph_device_bytes,
        "executable_bytes_a_graph": executables(measured),
        "context_bytes": measured.context_bytes,
        "kept_as_foretold": kept_as_foretold(plan, measured),
    }


def config_of(model: str, device: Device, folder: Path, max_model_len: int, kernels: Any, pool: bool) -> WorkerConfig:
    changes: dict[str, Any] = {"max_batch": 256, "max_model_len": max_model_len, "kernels": kernels}
    if device == "cpu":
        model, changes = TINY, TINY_CHANGES | {"kernels": "torch", "dtype": "float32"}
    path = write_config(model, folder)
    return WorkerConfig(model=str(path), load_format="dummy", device=device, use_graph_pool=pool, **changes)


def show(plan: MemoryPlan, measured: MeasuredMemory) -> None:
    from rich.console import Console

    from cluster.cli.plan_tables import plan_report

    Console(file=sys.stdout, width=150).print(plan_report(plan, measured))


def values(plan: MemoryPlan, measured: MeasuredMemory) -> dict[str, Any]:
    from cluster.cli.plan_tables import plan_values

    return plan_values(plan, measured)


def line_errors(plan: MemoryPlan, measured: MeasuredMemory) -> dict[str, float]:
    """Of each key's pool memory by itself; it comes in segments of 2 MiB, so less than one off is no error."""
    if plan.graphs is None:
        return {}
    found = {}
    for line in plan.graphs.lines:
        key = measured.graphs.get(line.key)
        if key is not None and key.pool_bytes:
            close = abs(line.alone_bytes - key.pool_bytes) <= 2 * MIB
            found[str(line.key)] = 0.0 if close else error(line.alone_bytes, key.pool_bytes)
    return found


def executables(measured: MeasuredMemory) -> float:
    """Device memory of a graph besides its pool."""
    outside = measured.graph_bytes - sum(key.pool_bytes for key in measured.graphs.values())
    return outside / max(len(measured.graphs), 1)


def kept_as_foretold(plan: MemoryPlan, measured: MeasuredMemory) -> bool:
    if plan.graphs is None:
        return not measured.graphs
    return {line.key for line in plan.graphs.lines if line.fits} == set(measured.graphs)


def error(expected: float, actual: float) -> float:
    """Of the expectation, relative to the measurement."""
    return (expected - actual) / actual if actual else 0.0


if __name__ == "__main__":
    print(main())
