"""The classic examples of CUDA graphs, as ratios of eager launches over replay, on one machine in one run.

    python -m bench.graph_seeds [--parts mlp,transformer,decode,serving]

By hand (CUDAGraphRunner): an MLP 2048-8192-2048 at batch 8, a 16-layer transformer at batch 4 and length 128, a decode step of a
transformers model over its StaticCache. Through the worker: first token, whole answer, and throughput at batch 32.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.clocks import host_ms, queued_ms, settle
from bench.engine_runs import (
    Tokens,
    Worker,
    agreement,
    answers,
    attempt,
    build,
    decode_step_ms,
    first_agreement,
    free_memory,
    hardware,
    parser,
    prompt,
)
from bench.modules import Mlp, StaticDecodeStep, Transformer, hf_model, made
from bench.options import parse_for_gpu, some_of
from bench.results_file import Results
from worker.config import Device
from worker.graphs.lanes import CopyMode
from worker.graphs.module_runner import CUDAGraphRunner

DECODE_MODEL, SERVED_MODEL = "qwen2.5-1.5b", "llama-2-7b"
PARTS = ("mlp", "transformer", "decode", "serving")


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS))
    args = parse_for_gpu(options, arguments)
    results = Results(bench="graph_seeds", hardware=hardware(args.device))
    parts = {"mlp": mlp, "transformer": transformer, "decode": decode, "serving": serving}
    for name in args.parts:
        results.correctness[name] = attempt(parts[name], args.device, results)
        print(name, results.correctness[name], flush=True)
        free_memory()
    for row in results.rows:
        print(f"  {row.model:16} {row.system:24} {row.metric:22} b{row.batch} {row.value:10.4f} {row.unit}")
    return results.write(args.out)


def mlp(device: Device, results: Results) -> dict[str, Any]:
    """fp16, batch 8."""
    sizes = (2048, 8192) if device == "cuda" else (32, 64)
    module = made(Mlp(*sizes), device)
    x = torch.rand(8, sizes[0], device=device, dtype=next(module.parameters()).dtype)
    return by_hand("mlp-2048-8192", module, {"x": x}, device, results)


def transformer(device: Device, results: Results) -> dict[str, Any]:
    """16 layers, batch 4, length 128; with the input copy on the same stream, and on one of its own."""
    module = made(Transformer() if device == "cuda" else Transformer(2, 32, 4), device)
    shape = (4, 128, 512) if device == "cuda" else (2, 8, 32)
    x = torch.rand(shape, device=device, dtype=next(module.parameters()).dtype)
    found = by_hand("transformer-16", module, {"x": x}, device, results)
    return found | by_hand("transformer-16", module, {"x": x}, device, results, copy="copy_stream")


def decode(device: Device, results: Results) -> dict[str, Any]:
    """One token of a transformers model at batch 1 over its static cache, and 32 tokens in a row."""
    context, length = (128, 512) if device == "cuda" else (8, 64)
    step = StaticDecodeStep(hf_model(DECODE_MODEL, device), batch=1, context=context, length=length)
    runner = CUDAGraphRunner()
    inputs = step.inputs(1)
    runner.warmup(step, inputs, reset=step.rewind)
    runner.capture(step, inputs)

    def eager(values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            out: Tensor = step(**values)
        return out

    step.rewind()
    expected = tokens_of(eager, step, context, length)
    step.rewind()
    replayed = tokens_of(lambda values: runner.replay(**values).clone(), step, context, length)
    same = sum(a == b for a, b in zip(replayed, expected, strict=True)) / len(expected)
    step.rewind()
    eager_ms = host_ms(lambda: eager(inputs), device)
    step.rewind()
    graph_ms = host_ms(lambda: runner.replay(**inputs), device)
    ratio(results, DECODE_MODEL, "decode_step_ms", graph_ms, eager_ms, batch=1, system="transformers static cache")
    runner.close()
    return {"tokens_equal_to_eager": same, "tokens": len(expected)}


def tokens_of(run: Any, step: StaticDecodeStep, context: int, length: int) -> list[int]:
    """32 greedy tokens from the end of the context."""
    values, found = step.inputs(1), []
    places = torch.arange(length, device=values["mask"].device)
    for position in range(context, min(context + 32, length)):
        values["position"].fill_(position)
        values["mask"].copy_((places <= position).view(1, 1, 1, -1))
        token = run(values).argmax(-1)
        found.append(int(token))
        values["token"].copy_(token.view(1, 1))
    return found


def serving(device: Device, results: Results) -> dict[str, Any]:
    """First token and 128 tokens at batch 1; throughput at batch 32 with 64 tokens each; prompts of 128."""
    values: dict[str, Any] = {"max_batch": 32, "max_model_len": 512, "kv_cache_bytes": 16 << 30, "prefill_chunk": 128}
    worker = build(SERVED_MODEL, device, capture="startup", **values)
    vocab, length = worker.engine.info.vocab_size, 128 if device == "cuda" else 12
    batch, out = (32, 64) if device == "cuda" else (4, 8)
    prompts = [prompt(length, row, vocab) for row in range(batch)]
    graph_tokens = answers(worker.engine, prompts[:8], 16)
    with worker.eager():
        eager_tokens = answers(worker.engine, prompts[:8], 16)
    for metric, rows, tokens in (("first_token_ms", 1, 1), ("answer_ms", 1, 2 * out), ("batch_ms", batch, out)):
        graph = answer_ms(worker, rows, length, tokens, device)
        with worker.eager():
            eager = answer_ms(worker, rows, length, tokens, device)
        ratio(results, SERVED_MODEL, metric, graph, eager, batch=rows, system="graphpool", scope="replica")
        if metric == "batch_ms":
            throughput(results, rows * tokens, graph, eager, rows)
    for rows in (1, batch):
        graph = decode_step_ms(worker.engine, rows, length, 30 if device == "cuda" else 5, device)
        with worker.eager():
            eager = decode_step_ms(worker.engine, rows, length, 30 if device == "cuda" else 5, device)
        ratio(results, SERVED_MODEL, "decode_step_ms", graph, eager, batch=rows, system="graphpool", scope="replica")
    found = {
        "first_tokens_equal_to_eager": first_agreement(graph_tokens, eager_tokens),
        "tokens_equal_to_eager": agreement(graph_tokens, eager_tokens),
        "keys_quarantined": len(worker.runner.dispatcher.quarantined),
    }
    worker.close()
    return found


_SEEDS = itertools.count(1000)


def answer_ms(worker: Worker, rows: int, length: int, max_tokens: int, device: Device) -> float:
    """Median milliseconds from submission to the last token of all; no prompt comes twice."""
    seconds = []
    for _ in range(2 if device == "cpu" else 5 if max_tokens > 1 else 13):
        prompts = [prompt(length, next(_SEEDS), worker.engine.info.vocab_size) for _ in range(rows)]
        settle(device)
        began = time.perf_counter()
        tokens: Tokens = answers(worker.engine, prompts, max_tokens)
        seconds.append(time.perf_counter() - began)
        assert all(len(each) == max_tokens for each in tokens.values())
    return 1e3 * median(seconds[1:])


def by_hand(
    name: str,
    module: nn.Module,
    inputs: dict[str, Tensor],
    device: Device,
    results: Results,
    copy: CopyMode = "same_stream",
) -> dict[str, Any]:
    """The module eagerly and replayed, calls one after the other, the input copied in each time."""

    def eager() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(**inputs)
        return out

    runner = CUDAGraphRunner(copy=copy)
    runner.warmup(module, inputs)
    runner.capture(module, inputs)
    new = {key: torch.rand_like(value) for key, value in inputs.items()}
    with torch.no_grad():
        expected = module(**new)
    difference = (runner.replay(**new).clone() - expected).abs().max()
    eager_ms = queued_ms(eager, device)
    graph_ms = queued_ms(lambda: runner.replay(**inputs), device)
    batch = next(iter(inputs.values())).shape[0]
    ratio(results, name, "forward_ms", graph_ms, eager_ms, batch=batch, system=f"by hand, {copy}")
    runner.close()
    return {f"max_difference_to_eager, {copy}": float(difference)}


def throughput(results: Results, tokens: int, graph_ms: float, eager_ms: float, batch: int) -> None:
    for system, value in (("graphpool", graph_ms), ("graphpool, eager", eager_ms)):
        results.add(
            system=system,
            model=SERVED_MODEL,
            batch=batch,
            metric="tokens_per_s",
            unit="1/s",
            value=1e3 * tokens / value,
            scope="replica",
        )


def ratio(
    results: Results,
    model: str,
    metric: str,
    graph: float,
    eager: float,
    *,
    batch: int,
    system: str,
    scope: str = "step",
) -> None:
    """Both times, and eager / graph."""
    for which, value in ((system, graph), (f"{system}, eager", eager)):
        results.add(system=which, model=model, batch=batch, metric=metric, unit="ms", value=value, scope=scope)
    name = metric.removesuffix("_ms") + "_eager_over_graph"
    results.add(system=system, model=model, batch=batch, metric=name, unit="ratio", value=eager / graph, scope=scope)


if __name__ == "__main__":
    print(main())
