"""Every graph of a worker: time to make an executable of it, memory expected and measured, and 10 000 steps from graphs alone.

    python -m bench.graph_keys [--runs fused,private,torch,torch-private,capped] [--model llama-3.2-1b]

fused: all keys of the default tiers, up to the model's limit, in one pool; then 10 000 steps of a mixed load, in which
nothing may be allocated and no step may run eagerly. private: a pool for each graph. torch, torch-private: the same with
attention that gathers keys and values, at a limit of 8192 tokens; gathered at 131072 tokens, 256 rows take 64 GiB, so
`capped` shows that such keys are dropped by the cap, and that the plan foretold which.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.clocks import settle
from bench.engine_runs import (
    Tokens,
    Worker,
    agreement,
    answers,
    attempt,
    build,
    first_agreement,
    free_memory,
    hardware,
    parser,
    prompt,
    step,
    submit,
)
from bench.options import parse_for_gpu, some_of
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.capture_forecast import CaptureForecast, forecast_captures
from worker.config import Device
from worker.graph_memory import StepMemory
from worker.graph_runner import worker_keys
from worker.graphs.key import GraphKey
from worker.step_kernels import TorchKernels
from worker.tiers import BucketTable, default_buckets

RUNS: dict[str, dict[str, Any]] = {
    "fused": {},
    "private": {"use_graph_pool": False},
    "torch": {"kernels": "torch", "max_model_len": 8192},
    "torch-private": {"kernels": "torch", "max_model_len": 8192, "use_graph_pool": False},
    "capped": {"kernels": "torch", "max_graph_bytes": 8 << 30},
}
NUM_STEPS = 10_000
LOAD_SEED = 7
MAX_INSTANTIATE_MS = 50.0


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--runs", type=some_of(RUNS), default=",".join(RUNS))
    options.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    options.add_argument("--steps", type=int, default=NUM_STEPS)
    args = parse_for_gpu(options, arguments)
    results = Results(bench="graph_keys", hardware=hardware(args.device))
    results.extra["keys"] = {}
    for run in args.runs:
        failed = attempt(measure, run, args.model, args.device, args.steps, results)
        if failed is not None:
            results.correctness[run] = failed
        free_memory()
    return results.write(args.out)


def measure(run: str, model: str, device: Device, num_steps: int, results: Results) -> None:
    values: dict[str, Any] = {
        "max_batch": 256,
        "prefill_chunk": 1024,
        "kv_cache_bytes": 24 << 30,
        "capture": "startup",
    } | RUNS[run]
    worker = build(model, device, **values)
    found: dict[str, Any] = check(worker)
    report_keys(run, model, worker, results)
    if run == "fused":
        found |= steady(worker, device, num_steps)
    results.correctness[run] = found
    print(run, found, flush=True)
    worker.close()


def check(worker: Worker) -> dict[str, Any]:
    """Each key was compared with eager when it was captured; here whole answers are."""
    engine, limit = worker.engine, worker.engine.info.max_model_len
    lengths = [1, 5, limit // 16 - 3, limit // 8, limit // 5]
    prompts = [prompt(min(max(length, 1), 2500), row, engine.info.vocab_size) for row, length in enumerate(lengths)]
    graph = answers(engine, prompts, 12)
    with worker.eager():
        eager = answers(engine, prompts, 12)
    dispatcher = worker.runner.dispatcher
    return {
        "keys_captured": len(dispatcher.captured),
        "keys_quarantined": {str(key): reason for key, reason in dispatcher.quarantined.items()},
        "keys_dropped": {str(key): reason for key, reason in dispatcher.dropped.items()},
        "first_tokens_equal_to_eager": first_agreement(graph, eager),
        "tokens_equal_to_eager": agreement(graph, eager),
        "worst_difference_in_self_checks": max(check.max_abs_diff for check in worker.runner.session.checks.values()),
    }


def report_keys(run: str, model: str, worker: Worker, results: Results) -> None:
    session, pool = worker.runner.session, worker.runner.session.recorder.pool
    forecast = expected(worker)
    lines = {}
    for line in forecast.lines:
        graph = session.graphs.get(line.key)
        lines[str(line.key)] = {
            "expected_alone_bytes": line.alone_bytes,
            "expected_added_bytes": line.added_bytes,
            "expected_to_fit": line.fits,
            **(
                {}
                if graph is None
                else {
                    "instantiate_ms": 1e3 * graph.cost.instantiate_s,
                    "capture_ms": 1e3 * graph.cost.capture_s,
                    "pool_bytes": graph.cost.pool_bytes,
                    "added_bytes": pool.bytes_by_key[line.key],
                }
            ),
        }
    results.extra["keys"][run] = lines
    instantiate = [1e3 * graph.cost.instantiate_s for graph in session.graphs.values()]
    fits = {line.key for line in forecast.lines if line.fits}
    values = {
        "num_keys": (len(session.graphs), "1"),
        "capture_s": (worker.capture_s, "s"),
        "instantiate_ms": (median(instantiate), "ms"),
        "max_instantiate_ms": (max(instantiate), "ms"),
        "graph_bytes": (pool.used_bytes, "B"),
        "graph_pool_bytes": (sum(graph.cost.pool_bytes for graph in session.graphs.values()), "B"),
        "expected_graph_bytes": (forecast.total_bytes, "B"),
        "expected_over_measured": (forecast.total_bytes / max(pool.used_bytes, 1), "ratio"),
        "keys_foretold": (sum((key in fits) == (key in session.graphs) for key in every_key(worker)), "1"),
        "instantiations_over_50_ms": (sum(each > MAX_INSTANTIATE_MS for each in instantiate), "1"),
    }
    for metric, (value, unit) in values.items():
        results.add(system="graphpool", model=model, metric=metric, unit=unit, value=value, scope="replica", note=run)
        print(f"  {run:14} {metric:26} {value:.4g} {unit}", flush=True)


def expected(worker: Worker) -> CaptureForecast:
    """What the plan says for the memory that is there."""
    runner = worker.runner
    memory = StepMemory(
        runner.eager.model.shape,
        runner.kv_cache.storage.dtype,
        runner.kv_cache.block_size,
        fused=not isinstance(runner.eager.kernels, TorchKernels),
    )
    free = runner.session.recorder.pool.backend.memory().free_bytes
    return forecast_captures(
        every_key(worker),
        memory,
        free_bytes=min(free + runner.session.recorder.pool.used_bytes, 1 << 50),
        use_pool=worker.config.use_graph_pool,
        max_bytes=worker.config.max_graph_bytes,
    )


def every_key(worker: Worker) -> list[GraphKey]:
    runner = worker.runner
    chunk = runner.eager.prefill_inputs.staging.device["token_ids"].shape[0]
    return worker_keys(runner.eager.tiers, worker.engine.scheduler.buckets, BucketTable(default_buckets(chunk)))


def steady(worker: Worker, device: Device, num_steps: int) -> dict[str, Any]:
    """A mixed load: prompts of all tiers, a batch that grows and shrinks."""
    engine, load, tokens = worker.engine, MixedLoad(worker), Tokens()
    load.run(max(num_steps // 50, 5), tokens)
    before, misses, replays = allocations(device), num_misses(worker), num_replays(worker)
    steps = engine.load().steps
    load.run(num_steps, tokens)
    settle(device)
    done, missed = engine.load().steps - steps, num_misses(worker) - misses
    allocated = allocations(device) - before
    while engine.has_work:
        step(engine, tokens)
    return {
        "steps": done,
        "steps_from_graphs": num_replays(worker) - replays,
        "hit_rate": 1 - missed / max(done, 1),
        "allocations": allocated,
        "requests": load.number,
        "keys_used": len({key for key, count in worker.runner.dispatcher.replays.items() if count}),
    }


class MixedLoad:
    """Requests without end."""

    def __init__(self, worker: Worker) -> None:
        self.engine = worker.engine
        self.number = 0
        self.random = random.Random(LOAD_SEED)
        limit = self.engine.info.max_model_len
        self.lengths = [min(length, limit // 2) for length in (200, 900, 3500, 8000)]
        self.rows = min(48, self.engine.scheduler.buckets.largest)

    def run(self, num_steps: int, tokens: Tokens) -> None:
        """Step `num_steps` times, always with something to do."""
        for count in range(num_steps):
            while len(self.engine.live_request_ids) < 1 + (count // 40 * 7) % self.rows:
                self._add()
            step(self.engine, tokens)

    def _add(self) -> None:
        self.number += 1
        longest = self.random.choices(self.lengths, weights=(70, 22, 7, 1))[0]
        length = self.random.randint(1, longest)
        ids = prompt(length, self.number, self.engine.info.vocab_size)
        submit(self.engine, f"load-{self.number}", ids, self.random.randint(1, 64))


def allocations(device: Device) -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if device == "cuda" else 0


def num_misses(worker: Worker) -> int:
    return sum(worker.runner.dispatcher.misses.values())


def num_replays(worker: Worker) -> int:
    return sum(worker.runner.dispatcher.replays.values())


if __name__ == "__main__":
    print(main())
