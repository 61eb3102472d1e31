"""Graph replay against eager launches, and against transformers, on one GPU in one run.

    python -m bench.graph_vs_eager [MODEL ...]

Random bf16 weights of public shapes, the same weights for both sides; a shape whose logits or tokens disagree is not
counted. Writes `bench/results/graph_vs_eager.json`.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.options import bench_parser, one_of, parse_for_gpu
from bench.peers import device_ms, hf_eager_step_ms, hf_graph_step_ms, hf_model, hf_prefill_ms, host_ms
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.build import create_engine
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.load_causal_lm import load_causal_lm
from worker.model.source import resolve_model
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

BATCHES = (1, 8, 32)
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


def build(folder: Path, **changes: Any) -> tuple[Engine, dict[str, float]]:
    """Our engine over the same weights, all graphs captured; and seconds by phase."""
    values: dict[str, Any] = {"max_batch": 32, "kv_cache_bytes": 12 << 30, "capture": "startup", "max_model_len": 4096}
    config = WorkerConfig(model=str(folder), device="cuda", **(values | changes))
    device = torch.device("cuda", 0)
    started = time.perf_counter()
    files = resolve_model(config.model)
    served = load_causal_lm(config, files, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    engine = create_engine(config, files, served, None)
    while engine.prepare_next():
        pass
    torch.cuda.synchronize()
    return engine, {"load_s": loaded - started, "capture_s": time.perf_counter() - loaded}


def prompt(length: int, seed: int, vocab: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def submit(engine: Engine, batch: int, length: int, max_tokens: int) -> None:
    for row in range(batch):
        engine.add(
            GenerateRequest(
                request_id=f"{row}",
                prompt_token_ids=prompt(length, row, engine.info.vocab_size),
                sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                use_prefix_cache=False,  # every repetition must do all of its work
            )
        )


def finish(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            answers.setdefault(event.request_id, []).extend(event.token_ids)
    return answers


def decode_steps_ms(engine: Engine, batch: int, *, use_graphs: bool) -> float:
    """Median milliseconds of an engine step, host included, with `batch` rows of 128 tokens and more."""
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    engine.runner = runner if use_graphs else runner.eager
    submit(engine, batch, 128, STEPS + 4)
    while any(not sequence.is_decoding for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    finish(engine)
    engine.runner = runner
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def first_token_ms(engine: Engine, length: int, *, use_graphs: bool) -> float:
    """Median milliseconds from submission to the first token of a lone prompt."""
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    engine.runner = runner if use_graphs else runner.eager

    def once() -> None:
        submit(engine, 1, length, 1)
        finish(engine)

    took = host_ms(once, rounds=15)
    engine.runner = runner
    return took


def launches(work: Any) -> int:
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
def check(engine: Engine, model: Any) -> dict[str, Any]:
    """Graph tokens against eager tokens, and our logits against transformers' on the same weights."""
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    submit(engine, 8, 120, 32)
    graph = finish(engine)
    engine.runner = runner.eager
    submit(engine, 8, 120, 32)
    eager = finish(engine)
    engine.runner = runner
    same = [sum(a == b for a, b in zip(graph[row], eager[row], strict=True)) for row in graph]
    ids = torch.tensor([prompt(128, 7, engine.info.vocab_size)], device="cuda")
    theirs = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    ours = last_logits(runner, ids[0].tolist())
    return {
        "tokens_equal_to_eager": sum(same) / (32 * len(same)),
        "relative_logit_error_to_transformers": float((ours - theirs).norm() / theirs.norm()),
        "keys_captured": len(runner.dispatcher.captured),
        "keys_quarantined": {str(key): reason for key, reason in runner.dispatcher.quarantined.items()},
        "keys_dropped": {str(key): reason for key, reason in runner.dispatcher.dropped.items()},
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
    runner.eager.prefill_inputs.fill(batch, key.bucket)  # type: ignore[union-attr]
    logits, _ = runner.session.graphs[key].replay().clone()  # type: ignore[index]
    return logits[0]  # type: ignore[no-any-return]


def measure_ours(name: str, engine: Engine, results: Results) -> None:
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    for batch in BATCHES:
        for system, use_graphs in (("graphpool", True), ("graphpool_eager", False)):
            value = decode_steps_ms(engine, batch, use_graphs=use_graphs)
            results.add(
                system=system,
                model=name,
                batch=batch,
                context=128,
                metric="decode_step_ms",
                unit="ms",
                value=value,
                scope="replica",
            )
        key = runner.dispatcher.find("decode", 256, batch)
        graph = runner.session.graphs[key]  # type: ignore[index]
        value = device_ms(lambda graph=graph: graph.replay())  # type: ignore[misc]
        results.add(
            system="graphpool",
            model=name,
            batch=batch,
            context=128,
            metric="decode_step_ms",
            unit="ms",
            value=value,
            scope="step",
        )
    for length in PROMPTS:
        for system, use_graphs in (("graphpool", True), ("graphpool_eager", False)):
            value = first_token_ms(engine, length, use_graphs=use_graphs)
            results.add(
                system=system,
                model=name,
                batch=1,
                context=length,
                metric="ttft_ms",
                unit="ms",
                value=value,
                scope="replica",
            )
    submit(engine, 1, 128, 12)
    for _ in range(4):
        engine.step()
    results.add(
        system="graphpool", model=name, batch=1, metric="launches", unit="1", value=launches(engine.step), scope="step"
    )
    engine.runner = runner.eager
    results.add(
        system="graphpool_eager",
        model=name,
        batch=1,
        metric="launches",
        unit="1",
        value=launches(engine.step),
        scope="step",
    )
    finish(engine)
    engine.runner = runner
    results.add(
        system="graphpool",
        model=name,
        metric="graph_bytes",
        unit="B",
        value=runner.session.recorder.pool.used_bytes,
        scope="replica",
    )


def measure_peer(name: str, model: Any, results: Results) -> None:
    for batch in BATCHES:
        for system, step in (("hf_eager", hf_eager_step_ms), ("hf_static_graph", hf_graph_step_ms)):
            results.add(
                system=system,
                model=name,
                batch=batch,
                context=128,
                metric="decode_step_ms",
                unit="ms",
                value=step(model, batch),
                scope="step",
            )
    for length in PROMPTS:
        results.add(
            system="hf_eager",
            model=name,
            batch=1,
            context=length,
            metric="ttft_ms",
            unit="ms",
            value=hf_prefill_ms(model, length),
            scope="step",
        )


def run(name: str, results: Results) -> None:
    model = hf_model(name)
    measure_peer(name, model, results)
    folder = save(name, model)
    engine, phases = build(folder)
    shutil.rmtree(folder)
    results.correctness[name] = check(engine, model)
    print(name, json.dumps(results.correctness[name]), {k: round(v, 2) for k, v in phases.items()}, flush=True)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    for metric, value in phases.items():
        results.add(system="graphpool", model=name, metric=metric, unit="s", value=value, scope="replica")
    measure_ours(name, engine, results)
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    runner.session.close()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", type=one_of(SHAPES), help=f"{', '.join(SHAPES)}; all by default"
    )
    models = parse_for_gpu(parser).models or list(SHAPES)
    results = Results(bench="graph_vs_eager", hardware=torch.cuda.get_device_name())
    for name in models:
        try:
            run(name, results)
        except Exception:  # noqa: BLE001 - one shape that fails must not lose the others
            traceback.print_exc()
            results.correctness[name] = {"failed": traceback.format_exc(limit=3)}
        gc.collect()
        torch.cuda.empty_cache()
        for row in (row for row in results.rows if row.model == name):
            print(
                f"  {row.model:14} {row.system:16} {row.metric:15} b{row.batch} c{row.context} {row.scope:8} {row.value:.3f} {row.unit}"
            )
        sys.stdout.flush()
        print(results.write())


if __name__ == "__main__":
    main()
