"""Graph replay against eager launches, and against transformers, on one GPU in one run.

    python -m bench.graph_vs_eager [MODEL ...]

Random bf16 weights of public shapes, the same weights for both sides; a shape whose logits or tokens disagree is not
counted. Writes `bench/results/graph_vs_eager.json`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.clocks import device_ms, host_ms
from bench.engine_runs import (
    Worker,
    agreement,
    answers,
    attempt,
    cancel_all,
    decoding_rows,
    free_memory,
    hardware,
    prompt,
    start,
    step,
)
from bench.options import bench_parser, one_of, parse_for_gpu
from bench.peers import hf_eager_step_ms, hf_graph_step_ms, hf_model, hf_prefill_ms
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.graphs.key import GraphKey
from worker.request import GenerateRequest

BATCHES = (1, 8, 32)
CONTEXT = 128
PROMPTS = (128, 1024)
STEPS = 60
SCRATCH = Path("/dev/shm/graphpool-bench")


def save(name: str, model: Any) -> Path:
    """The peer's weights and config, for us to load."""
    from safetensors.torch import save_file

    folder = SCRATCH / name
    folder.mkdir(parents=True, exist_ok=True)
    tied = SHAPES[name]["tie_word_embeddings"]
    state = {
        key: value.contiguous() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | {"architectures": [type(model).__name__]}))
    return folder


def load(folder: Path) -> Worker:
    """Our engine over the same weights, all graphs captured."""
    values: dict[str, Any] = {"max_batch": 32, "kv_cache_bytes": 12 << 30, "capture": "startup", "max_model_len": 4096}
    return start(WorkerConfig(model=str(folder), device="cuda", dtype="bfloat16", **values))


def prompts(engine: Engine, batch: int, length: int) -> list[tuple[int, ...]]:
    return [prompt(length, row, engine.info.vocab_size) for row in range(batch)]


def step_ms(engine: Engine, batch: int) -> float:
    """Median milliseconds of an engine step, host included, with `batch` rows of 128 tokens and more."""
    tokens = decoding_rows(engine, batch, CONTEXT, STEPS)
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step(engine, tokens)
        seconds.append(time.perf_counter() - started)
    cancel_all(engine)
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def first_token_ms(engine: Engine, length: int) -> float:
    """Median milliseconds from submission to the first token of a lone prompt."""
    return host_ms(lambda: answers(engine, prompts(engine, 1, length), 1), rounds=15, warm=5)


def launches(work: Callable[[], object]) -> int:
    """Kernel launches (and graph launches) of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(
        event.count
        for event in profiler.key_averages()
        if event.key
        in ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")
    )


@torch.no_grad()
def check(worker: Worker, model: Any) -> dict[str, Any]:
    """Graph tokens against eager tokens, and our logits against transformers' on the same weights."""
    engine, dispatcher = worker.engine, worker.runner.dispatcher
    asked = prompts(engine, 8, 120)
    graph = answers(engine, asked, 32)
    with worker.eager():
        eager = answers(engine, asked, 32)
    ids = torch.tensor([prompt(CONTEXT, 7, engine.info.vocab_size)], device=model.device)
    theirs = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    ours = last_logits(worker.runner, ids[0].tolist())
    return {
        "tokens_equal_to_eager": agreement(graph, eager),
        "relative_logit_error_to_transformers": float((ours - theirs).norm() / theirs.norm()),
        "keys_captured": len(dispatcher.captured),
        "keys_quarantined": {str(key): reason for key, reason in dispatcher.quarantined.items()},
        "keys_dropped": {str(key): reason for key, reason in dispatcher.dropped.items()},
    }


def last_logits(runner: GraphRunner, ids: list[int]) -> torch.Tensor:
    """Logits of the last token through the captured prefill graph."""
    from worker.batch import Batch, Segment
    from worker.sequence import Sequence

    request = GenerateRequest(request_id="check", prompt_token_ids=tuple(ids))
    sequence = Sequence(request=request, index=0, max_tokens=1, arrival_s=0.0)
    sequence.block_table = list(range(1, 1 + -(-len(ids) // runner.kv_cache.block_size)))
    batch = Batch("prefill", (Segment(sequence, 0, len(ids)),), runner.eager.tiers.fit(len(ids)), len(ids))
    key = runner._find(batch)
    assert isinstance(key, GraphKey), key
    runner.eager.prefill_inputs.fill(batch, key.bucket)
    logits: torch.Tensor = runner.session.graphs[key].replay().clone()[0]
    return logits[0]


def measure_ours(name: str, worker: Worker, results: Results) -> None:
    """Through the graphs, and the same eagerly."""
    runner = worker.runner
    add = partial(results.add, model=name)
    measure_engine(worker.engine, partial(add, system="graphpool"))
    with worker.eager():
        measure_engine(worker.engine, partial(add, system="graphpool_eager"))
    for batch in BATCHES:
        key = runner.dispatcher.find("decode", 256, batch)
        assert isinstance(key, GraphKey), key
        value = device_ms(runner.session.graphs[key].replay)
        add(
            system="graphpool", batch=batch, context=CONTEXT, metric="decode_step_ms", unit="ms", value=value,
            scope="step",
        )  # fmt: skip
    num_bytes = runner.session.recorder.pool.used_bytes
    add(system="graphpool", metric="graph_bytes", unit="B", value=num_bytes, scope="replica")


def measure_engine(engine: Engine, add: Callable[..., None]) -> None:
    """As its runner is now."""
    ms = partial(add, unit="ms", scope="replica")
    for batch in BATCHES:
        ms(metric="decode_step_ms", batch=batch, context=CONTEXT, value=step_ms(engine, batch))
    for length in PROMPTS:
        ms(metric="ttft_ms", batch=1, context=length, value=first_token_ms(engine, length))
    tokens = decoding_rows(engine, 1, CONTEXT, 8)
    for _ in range(3):
        step(engine, tokens)
    add(metric="launches", batch=1, unit="1", value=launches(partial(step, engine, tokens)), scope="step")
    cancel_all(engine)


def measure_peer(name: str, model: Any, results: Results) -> None:
    ms = partial(results.add, model=name, unit="ms", scope="step")
    for batch in BATCHES:
        for system, measure in (("hf_eager", hf_eager_step_ms), ("hf_static_graph", hf_graph_step_ms)):
            ms(system=system, metric="decode_step_ms", batch=batch, context=CONTEXT, value=measure(model, batch))
    for length in PROMPTS:
        ms(system="hf_eager", metric="ttft_ms", batch=1, context=length, value=hf_prefill_ms(model, length))


def run(name: str, results: Results) -> None:
    """One shape: the peer, then the worker over the peer's weights."""
    model = hf_model(name)
    measure_peer(name, model, results)
    folder = save(name, model)
    worker = load(folder)
    shutil.rmtree(folder)
    results.correctness[name] = check(worker, model)
    phases = {"load_s": worker.load_s, "capture_s": worker.capture_s}
    print(name, json.dumps(results.correctness[name]), {k: round(v, 2) for k, v in phases.items()}, flush=True)
    del model
    free_memory()
    for metric, value in phases.items():
        results.add(system="graphpool", model=name, metric=metric, unit="s", value=value, scope="replica")
    measure_ours(name, worker, results)
    worker.close()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", type=one_of(SHAPES), help=f"{', '.join(SHAPES)}; all by default"
    )
    models = parse_for_gpu(parser).models or list(SHAPES)
    results = Results(bench="graph_vs_eager", hardware=hardware("cuda"))
    for name in models:
        failed = attempt(run, name, results)
        if failed is not None:
            results.correctness[name] = failed
        free_memory()
        for row in (row for row in results.rows if row.model == name):
            where = f"b{row.batch} c{row.context} {row.scope:8}"
            print(f"  {row.model:14} {row.system:16} {row.metric:15} {where} {row.value:.3f} {row.unit}", flush=True)
        print(results.write())


if __name__ == "__main__":
    main()
