"""One executable graph that is updated for each step, against one executable kept for each key.

    python -m bench.graph_update [--model llama-3.2-1b]

The worker's own graphs are recorded once. "kept": every key has its executable, a step is one launch. "updated": one
executable is turned into the key that is needed (cudaGraphExecUpdate) and launched; where CUDA refuses the update, it is
made anew. Both run the same sequence of keys; the outputs must be equal. Writes the table and the choice that follows.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from bench.clocks import settle
from bench.cuda_runtime import CudaRuntime
from bench.engine_runs import Worker, build, hardware, parser
from bench.options import parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.config import Device
from worker.graphs.captured import CapturedGraph
from worker.graphs.key import GraphKey

NUM_STEPS = 300
NUM_COMPARED = 40
MIB = 1 << 20


@dataclass(slots=True)
class Way:
    """One way to run a sequence of keys, measured."""

    prepare_ms: list[float] = field(default_factory=list)
    """Before each launch."""
    step_ms: float = 0.0
    memory_bytes: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    args = parse_for_gpu(options, arguments)
    results = Results(bench="graph_update", hardware=hardware(args.device))
    worker = recorded_worker(args.model, args.device)
    keys = sequence(list(worker.runner.session.graphs), 20 if args.device == "cpu" else NUM_STEPS)
    runtime = CudaRuntime() if args.device == "cuda" else None
    table: dict[str, Any] = {"keys": len(worker.runner.session.graphs), "steps": len(keys)}
    if runtime is None:
        results.correctness["updates"] = "emulated captures have no executables: only the path was run"
        report(results, args.model, "kept", run(worker, keys, args.device, lambda graph: graph.replay))
    else:
        table |= compare(worker, keys, runtime, results, args.model)
    results.extra["table"] = table
    for name, value in table.items():
        print(f"  {name}: {value}")
    worker.close()
    return results.write(args.out)


def recorded_worker(model: str, device: Device) -> Worker:
    """A worker whose graphs keep their descriptions. All tiers are those of a limit of 4096 tokens."""
    changed = mock.patch("worker.build.backend_for", keeping_backend) if device == "cuda" else contextlib.nullcontext()
    with changed:
        return build(model, device, max_batch=32, max_model_len=4096, kv_cache_bytes=8 << 30, capture="startup")


def keeping_backend(device: torch.device) -> Any:
    from worker.graphs.cuda_backend import CudaCapture

    return CudaCapture(device, keep_graph=True)


def sequence(keys: list[GraphKey], num_steps: int) -> list[GraphKey]:
    """Decode keys mostly, as in service: runs of one key, and changes of bucket, tier and phase between them."""
    rng, found = random.Random(3), list[GraphKey]()
    decode = [key for key in keys if key.phase == "decode"]
    while len(found) < num_steps:
        key = rng.choice(decode if rng.random() < 0.8 else keys)
        found += [key] * rng.choice((1, 2, 8))
    return found[:num_steps]


def compare(
    built: Worker, keys: Sequence[GraphKey], runtime: CudaRuntime, results: Results, model: str
) -> dict[str, Any]:
    graphs = built.runner.session.graphs
    raw = {key: graph._recorded.graph.raw_cuda_graph() for key, graph in graphs.items()}  # type: ignore[union-attr]
    many_bytes, make_ms, executables = keep_all(runtime, raw)
    kept = run(built, keys, "cuda", lambda graph: _launcher(runtime, executables[graph.key]))
    for executable in executables.values():
        runtime.destroy(executable)
    single = SingleExecutable(runtime, raw, keys[0])
    updated = run(built, keys, "cuda", single.prepare)
    single.close()
    pairs = list(zip(kept.outputs, updated.outputs, strict=True))
    results.correctness["outputs_equal"] = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)
    results.correctness["outputs_compared"] = len(pairs)
    kept.memory_bytes, updated.memory_bytes = many_bytes, single.memory_bytes
    report(results, model, "kept", kept)
    report(results, model, "updated", updated)
    nodes = {str(key): runtime.num_nodes(graph) for key, graph in raw.items()}
    added = sum(graph.cost.num_bytes - graph.cost.pool_bytes for graph in graphs.values())
    return {
        "updates refused, by reason": dict(single.refusals),
        "updates done": single.num_updates,
        "update ms, median": median(single.update_ms) if single.update_ms else None,
        "making one ms, median": median(make_ms),
        "step ms, kept": kept.step_ms,
        "step ms, updated": updated.step_ms,
        "updated / kept, time": updated.step_ms / kept.step_ms,
        "executables MiB, kept": many_bytes / MIB,
        "executables MiB, updated": single.memory_bytes / MIB,
        "executables MiB, as the session counted them": added / MIB,
        "nodes of a graph, least": min(nodes.values()),
        "nodes of a graph, most": max(nodes.values()),
        "bytes of a node": many_bytes / sum(nodes.values()),
        "nodes by key": nodes,
        "choice": choice(kept, updated, single),
    }


def keep_all(runtime: CudaRuntime, raw: dict[GraphKey, int]) -> tuple[int, list[float], dict[GraphKey, int]]:
    """(device memory, milliseconds of each, executables) of all graphs."""
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    executables, took = {}, []
    for key, graph in raw.items():
        began = time.perf_counter()
        executables[key] = runtime.instantiate(graph)
        took.append(1e3 * (time.perf_counter() - began))
    for executable in executables.values():
        runtime.launch(executable)  # what an executable needs on the device may come with its first launch
    torch.cuda.synchronize()
    return free - torch.cuda.mem_get_info()[0], took, executables


class SingleExecutable:
    """One executable for all keys."""

    def __init__(self, runtime: CudaRuntime, raw: dict[GraphKey, int], first: GraphKey) -> None:
        self.runtime = runtime
        self.raw = raw
        self.refusals: Counter[str] = Counter()
        self.num_updates = 0
        self.update_ms: list[float] = []
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        self.executable = runtime.instantiate(raw[first])
        runtime.launch(self.executable)
        torch.cuda.synchronize()
        self.memory_bytes = free - torch.cuda.mem_get_info()[0]
        self._key = first

    def prepare(self, graph: CapturedGraph) -> Callable[[], Any]:
        """Update the executable for a key, or make it anew."""
        key = graph.key
        if key != self._key:
            torch.cuda.current_stream().synchronize()  # CUDA forbids changing what is running
            began = time.perf_counter()
            result = self.runtime.update(self.executable, self.raw[key])
            if result == "success":
                self.num_updates += 1
                self.update_ms.append(1e3 * (time.perf_counter() - began))
            else:
                self.refusals[result] += 1
                self.runtime.destroy(self.executable)
                self.executable = self.runtime.instantiate(self.raw[key])
            self._key = key
        return _launcher(self.runtime, self.executable)

    def close(self) -> None:
        """Give its memory back."""
        self.runtime.destroy(self.executable)


@torch.inference_mode()
def run(
    built: Worker,
    keys: Sequence[GraphKey],
    device: Device,
    prepare: Callable[[CapturedGraph], Callable[[], Any]],
) -> Way:
    """The sequence twice: for the outputs, and for the time of all of it."""
    graphs, way = built.runner.session.graphs, Way()
    built.runner._make_inert()
    generator = torch.Generator().manual_seed(0)
    for key in keys[:NUM_COMPARED]:
        graph = graphs[key]
        assert graph.region.draw is not None
        rows = graph.region.draw(generator, False)
        launch = prepare(graph)
        graph._outputs[0].fill_(torch.nan)  # what an earlier launch has left must not count
        launch()
        way.outputs.append(graph._outputs[0][:rows].clone())
    built.runner._make_inert()
    settle(device)
    began = time.perf_counter()
    for key in keys:
        asked = time.perf_counter()
        launch = prepare(graphs[key])
        way.prepare_ms.append(1e3 * (time.perf_counter() - asked))
        launch()
    settle(device)
    way.step_ms = 1e3 * (time.perf_counter() - began) / len(keys)
    return way


def report(results: Results, model: str, name: str, way: Way) -> None:
    for metric, unit, value in (
        ("step_ms", "ms", way.step_ms),
        ("prepare_ms", "ms", sum(way.prepare_ms) / len(way.prepare_ms)),
        ("executable_bytes", "B", float(way.memory_bytes)),
    ):
        results.add(system=name, model=model, metric=metric, unit=unit, value=value, scope="step")


def choice(kept: Way, updated: Way, single: SingleExecutable) -> str:
    """What the figures say."""
    slower, saved = updated.step_ms / kept.step_ms, (kept.memory_bytes - updated.memory_bytes) / MIB
    refused = sum(single.refusals.values())
    changes = refused + single.num_updates
    verdict = "keep one executable a key" if slower > 1.02 else "update one executable"
    return (
        f"{verdict}: updating saves {saved:.0f} MiB, makes a step {slower:.2f} times as long, and is refused for "
        f"{refused} of {changes} changes of key"
    )


def _launcher(runtime: CudaRuntime, executable: int) -> Callable[[], Any]:
    return lambda: runtime.launch(executable)


if __name__ == "__main__":
    print(main())
