"""How steps are put in order, and what is captured: events against waits, one stream or two, whole against split graphs.

    python -m bench.graph_ordering [--model llama-3.2-1b]

Every ratio is of two ways over the same weights in one run: over 1, the first is faster. Also names every key of the worker
whose replay is slower than launching the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.clocks import host_ms, queued_ms, settle
from bench.engine_runs import (
    Worker,
    answers,
    attempt,
    build,
    decode_step_ms,
    free_memory,
    hardware,
    parser,
    prompt,
)
from bench.modules import Mlp, StaticDecodeStep, Transformer, hf_model, made
from bench.options import parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.config import Device
from worker.graphs.backend import backend_for
from worker.graphs.captured import CapturedGraph
from worker.graphs.lanes import CopyMode
from worker.graphs.lease import ReplayLease
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.partial import PartialGraphs
from worker.graphs.pool import GraphPool
from worker.graphs.readback import HostReadback, PendingRead
from worker.graphs.sync_counter import SyncCounter, SyncKind

QUEUE = {"cuda": 100, "cpu": 10}


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    args = parse_for_gpu(options, arguments)
    results = Results(bench="graph_ordering", hardware=hardware(args.device))
    for part in (engine_ordering, queue_ordering, copies, split_by_hand, split_transformers):
        results.correctness[part.__name__] = attempt(part, args.model, args.device, results)
        print(part.__name__, results.correctness[part.__name__], flush=True)
        free_memory()
    for row in results.rows:
        print(f"  {row.system:28} {row.metric:20} b{row.batch} {row.value:.4f} {row.unit} {row.note or ''}")
    return results.write(args.out)


def engine_ordering(model: str, device: Device, results: Results) -> dict[str, Any]:
    """The worker's own steps, with and without a wait for the whole device before each replay."""
    worker = build(model, device, max_batch=32, max_model_len=4096, kv_cache_bytes=12 << 30, capture="startup")
    engine, num_steps = worker.engine, 60 if device == "cuda" else 10
    length = 128 if device == "cuda" else 9
    prompts = [prompt(length, row, engine.info.vocab_size) for row in range(4)]
    with SyncCounter() as syncs:
        ordered_tokens = answers(engine, prompts, 16)
    with synchronized(device):
        waiting_tokens = answers(engine, prompts, 16)
    for batch in (1, 32) if device == "cuda" else (1, 4):
        ordered = decode_step_ms(engine, batch, length, num_steps, device)
        with synchronized(device):
            waiting = decode_step_ms(engine, batch, length, num_steps, device)
        with worker.eager():
            eager = decode_step_ms(engine, batch, length, num_steps, device)
        again = decode_step_ms(engine, batch, length, num_steps, device)
        pair(
            results, model, "event ordered", min(ordered, again), "synchronized", waiting, batch=batch, scope="replica"
        )
        pair(results, model, "graph", min(ordered, again), "eager", eager, batch=batch, scope="replica")
    slower = slower_than_eager(worker, model, device, results)
    found = {
        "tokens_equal": ordered_tokens == waiting_tokens,
        "waits_for_the_device": syncs.count(SyncKind.DEVICE),
        "waits_for_a_stream": syncs.count(SyncKind.STREAM),
        "keys_slower_than_eager": slower,
        "keys_compared": len(worker.runner.session.graphs),
        "keys_quarantined": len(worker.runner.dispatcher.quarantined),
    }
    worker.close()
    return found


def slower_than_eager(worker: Worker, model: str, device: Device, results: Results) -> dict[str, float]:
    """Every key: one replay against one eager run of the same shape. Those that lose, with replay / eager."""
    worker.runner._make_inert()
    slower, rounds = {}, 7 if device == "cuda" else 2
    for key, graph in worker.runner.session.graphs.items():
        replay = host_ms(graph.replay, device, rounds=rounds, warm=2)
        eager = host_ms(graph.region.run, device, rounds=rounds, warm=2)
        results.add(
            system="graphpool", model=model, metric="key_eager_over_graph", unit="ratio", value=eager / replay,
            scope="step", note=str(key),
        )  # fmt: skip
        if replay > eager:
            slower[str(key)] = replay / eager
    worker.runner._make_inert()
    return slower


def queue_ordering(model: str, device: Device, results: Results) -> dict[str, Any]:  # noqa: ARG001
    """A queue of requests by hand: input copy, replay, read-back, ordered by events, or with a wait before each replay."""
    module, x = transformer(device)
    runner = captured(module, x)
    length = QUEUE[device]
    requests = [pinned(torch.rand_like(x).cpu(), device) for _ in range(8)]
    found: dict[str, list[Tensor]] = {}

    def ordered() -> None:
        readback, rows = HostReadback(depth=4), list[Tensor]()
        pending: list[PendingRead] = []
        for number in range(length):
            if len(pending) == 3:
                rows.append(pending.pop(0).result().clone())
            pending.append(readback.start(runner.replay(requests[number % 8])))
        found["ordered"] = rows + [each.result().clone() for each in pending]

    def waiting() -> None:
        rows = []
        for number in range(length):
            settle(device)
            rows.append(runner.replay(requests[number % 8]).clone().cpu())
        found["waiting"] = rows

    fast = host_ms(ordered, device, rounds=5, warm=1) / length
    slow = host_ms(waiting, device, rounds=5, warm=1) / length
    pair(results, "transformer-16", "event ordered queue", fast, "synchronized queue", slow, batch=x.shape[0])
    same = all(torch.equal(a, b) for a, b in zip(found["ordered"], found["waiting"], strict=True))
    expected = module(requests[3].to(device)).cpu()
    return {"outputs_equal": same, "error_to_eager": error(found["ordered"][3], expected)}


def copies(model: str, device: Device, results: Results) -> dict[str, Any]:  # noqa: ARG001
    """Input copies on the replay's stream, or on one of their own: a small model, and one whose inputs are large."""
    found: dict[str, Any] = {}
    wide = (16384, 2048) if device == "cuda" else (8, 16)
    module, x = transformer(device)
    large = made(Mlp(wide[1], wide[1]), device)
    for name, net, sample in (
        ("transformer-16", module, x),
        ("mlp, large input", large, torch.rand(wide, device=device, dtype=next(large.parameters()).dtype)),
    ):
        source = pinned(torch.rand_like(sample).cpu(), device)
        ways: dict[CopyMode, float] = {}
        outputs: list[Tensor] = []
        for mode in ("same_stream", "copy_stream"):
            runner = captured(net, sample, copy=mode)
            ways[mode] = queued_ms(partial(runner.replay, source), device)
            outputs.append(runner.replay(source).clone())
            if mode == "same_stream":
                alone = queued_ms(runner.graph.replay, device)
            runner.close()
        pair(
            results, name, "one stream", ways["same_stream"], "copy stream", ways["copy_stream"], batch=sample.shape[0]
        )
        found[name] = {
            "outputs_equal": torch.equal(*outputs),
            "copy_share_of_a_step": 1 - alone / ways["same_stream"],
            "error_to_eager": error(outputs[0], net(source.to(device))),
        }
    return found


def split_by_hand(model: str, device: Device, results: Results) -> dict[str, Any]:  # noqa: ARG001
    """A 16-layer transformer: one graph, graphs of its attention and MLP parts, of one kind of part, and none."""
    module, x = transformer(device)
    return split(module, "transformer-16", {"x": x}, device, results, reset=None)


def split_transformers(model: str, device: Device, results: Results) -> dict[str, Any]:
    """A decode step of a transformers model over its static cache, split in the same ways."""
    context, length = (128, 512) if device == "cuda" else (8, 64)
    step = StaticDecodeStep(hf_model(model, device), batch=1, context=context, length=length)
    return split(step, model, step.inputs(1), device, results, reset=step.rewind)


def split(
    module: nn.Module,
    name: str,
    inputs: dict[str, Tensor],
    device: Device,
    results: Results,
    *,
    reset: Callable[[], None] | None,
) -> dict[str, Any]:
    rewind = reset or (lambda: None)

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(**inputs)
        return out

    def result() -> Tensor:
        rewind()
        return run().clone()

    def timed(work: Callable[[], Any]) -> float:
        rewind()
        return host_ms(work, device)

    eager, expected = timed(run), result()
    runner = CUDAGraphRunner()
    runner.warmup(module, inputs, reset=reset)
    runner.capture(module, inputs)

    whole = timed(lambda: runner.replay(**inputs))
    rewind()
    found: dict[str, Any] = {"whole": error(runner.replay(**inputs).clone(), expected)}
    runner.close()
    pair(results, name, "whole graph", whole, "eager parts", eager, batch=1)
    kinds: dict[str, tuple[str, ...]] = {
        "attention and MLP graphs": ("attention", "self_attn", "mlp"),
        "attention graphs": ("attention", "self_attn"),
        "MLP graphs": ("mlp",),
    }
    for kind, names in kinds.items():
        graphs = PartialGraphs(module, partial(is_part, names), pool=GraphPool(backend_for(device)))
        graphs.capture((), inputs, reset=reset)
        found[kind] = error(result(), expected)
        pair(results, name, "whole graph", whole, kind, timed(run), batch=1)
        found[f"{kind}, eager calls"] = sum(graphs.eager_calls.values())
        graphs.remove()
    return found


def is_part(names: Sequence[str], path: str, _: nn.Module) -> bool:
    """Whether the last word of a submodule's path is one of `names`."""
    return path.rpartition(".")[2] in names


def pair(
    results: Results, model: str, first: str, first_ms: float, second: str, second_ms: float, *, batch: int,
    scope: str = "step",
) -> None:  # fmt: skip
    """Both times, and second / first."""
    for system, value in ((first, first_ms), (second, second_ms)):
        results.add(system=system, model=model, batch=batch, metric="step_ms", unit="ms", value=value, scope=scope)
    results.add(
        system=first, model=model, batch=batch, metric="speedup", unit="ratio", value=second_ms / first_ms,
        scope=scope, note=f"{second} / {first}",
    )  # fmt: skip


@contextlib.contextmanager
def synchronized(device: Device) -> Iterator[None]:
    """Every replay first waits for the whole device."""
    replay = CapturedGraph.replay

    def waiting(self: CapturedGraph) -> ReplayLease:
        settle(device)
        return replay(self)

    CapturedGraph.replay = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        CapturedGraph.replay = replay  # type: ignore[method-assign]


def transformer(device: Device) -> tuple[nn.Module, Tensor]:
    """16 layers at batch 4 and length 128, and an input."""
    torch.manual_seed(0)
    module = made(Transformer() if device == "cuda" else Transformer(2, 32, 4), device)
    shape = (4, 128, 512) if device == "cuda" else (2, 8, 32)
    return module, torch.rand(shape, device=device, dtype=next(module.parameters()).dtype)


def captured(module: nn.Module, sample: Tensor, copy: CopyMode = "same_stream") -> CUDAGraphRunner:
    runner = CUDAGraphRunner(copy=copy)
    runner.warmup(module, sample)
    runner.capture(module, sample)
    return runner


def pinned(tensor: Tensor, device: Device) -> Tensor:
    return tensor.pin_memory() if device == "cuda" else tensor


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative, over all elements."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


if __name__ == "__main__":
    print(main())
