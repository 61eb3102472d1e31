"""The engine against transformers `generate` on the embedded model, on the CPU, in one run.

    python -m bench.cpu_engine

Greedy, the same prompts and the same number of new tokens for both; the tokens must agree. Prints ratios and writes
`bench/results/cpu_engine.json`; also a replica's resident memory and its start-up by phase.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.options import bench_parser
from bench.results_file import Results, cpu_name

MODEL = "smollm2-135m"
NEW_TOKENS = 64
STREAMS = 8
ROUNDS = 2
PROMPTS = [
    "The three laws of motion say that",
    "A short history of the bicycle:",
    "To bake bread at home you need",
    "The capital of France is",
    "In the beginning the sea was",
    "Photosynthesis is the process by which",
    "The best way to learn a language is",
    "Once upon a time there was a lighthouse",
]


def build() -> tuple[Any, Any, list[list[int]]]:
    """(engine, transformers model, prompts as token ids), both over the same files."""
    import torch
    from transformers import AutoModelForCausalLM

    from worker.build import create_engine
    from worker.config import WorkerConfig
    from worker.load_causal_lm import load_causal_lm
    from worker.model.source import resolve_model
    from worker.text.processor import TextProcessor

    config = WorkerConfig(model=MODEL, device="cpu")
    files = resolve_model(MODEL)
    text = TextProcessor.from_files(files)
    model = load_causal_lm(config, files, device=torch.device("cpu"), dtype=torch.float32)
    peer = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32).eval()
    return create_engine(config, files, model, text), peer, [text.encode(prompt) for prompt in PROMPTS]


def run_engine(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts together through continuous batching."""
    from worker.request import ChoiceDelta, GenerateRequest
    from worker.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=params))
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            answers[int(event.request_id)] += event.token_ids
    return answers


def run_peer(peer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """One `generate` call, left-padded when there are several prompts."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = peer.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return out[:, width:].tolist()  # type: ignore[no-any-return]


def timed(work: Callable[[], list[list[int]]], rounds: int = ROUNDS) -> tuple[float, list[list[int]]]:
    """The quickest of `rounds`, and the answer, which must be the same each time."""
    answers, seconds = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        answers.append(work())
        seconds.append(time.perf_counter() - started)
    assert all(answer == answers[0] for answer in answers)
    return min(seconds), answers[0]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Fraction of equal leading tokens."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return sum(same) / sum(map(len, ours))


def replica_footprint() -> dict[str, float]:
    """Start a worker process, answer once, and read its memory and its phases."""
    code = (
        "import time,json,psutil;t0=time.perf_counter();import torch;t1=time.perf_counter()\n"
        "from worker.build import build_engine;from worker.config import WorkerConfig\n"
        "from worker.request import GenerateRequest;from worker.sampling import SamplingParams;import threading\n"
        "t2=time.perf_counter();done=threading.Event();seen=[]\n"
        "def sink(events):\n"
        "    seen.append(time.perf_counter())\n"
        "    if any(getattr(e,'finish_reason',None) for e in events): done.set()\n"
        f"built=build_engine(WorkerConfig(model={MODEL!r},device='cpu'),sink);t3=time.perf_counter()\n"
        "built.engine.submit(GenerateRequest(request_id='r',prompt_token_ids=tuple(range(100,164)),sampling=SamplingParams(max_tokens=32,ignore_eos=True,temperature=0)))\n"
        "done.wait(120);rss=psutil.Process().memory_info().rss;built.engine.stop()\n"
        "print(json.dumps({'import_torch_s':t1-t0,'import_worker_s':t2-t1,'load_s':t3-t2,'first_token_s':seen[0]-t3,'rss_bytes':rss}))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    return json.loads(out.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    bench_parser(__doc__).parse_args()
    from rich.console import Console
    from rich.table import Table

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    results = Results(bench="cpu_engine", hardware=cpu_name())
    footprint = replica_footprint()
    engine, peer, prompts = build()
    one, many = prompts[:1], prompts[:STREAMS]
    for warm in (run_engine, run_peer):
        warm(engine if warm is run_engine else peer, one)
    ours_one, answer_one = timed(lambda: run_engine(engine, one))
    peer_one, expected_one = timed(lambda: run_peer(peer, one))
    ours_many, answer_many = timed(lambda: run_engine(engine, many))
    peer_batched, _ = timed(lambda: run_peer(peer, many))
    peer_sequential, expected_many = timed(lambda: [run_peer(peer, [prompt])[0] for prompt in many], rounds=1)
    results.correctness = {
        "same_tokens_one_stream": agreement(answer_one, expected_one),
        "same_tokens_streams": agreement(answer_many, expected_many),
    }
    console, table = Console(), Table("what", "graphpool s", "transformers s", "ratio", "goal")
    for what, ours, theirs, goal in (
        ("1 stream", ours_one, peer_one, 1.0),
        (f"{STREAMS} streams / sequential calls", ours_many, peer_sequential, 2.5),
        (f"{STREAMS} streams / one batched call", ours_many, peer_batched, 1.0),
    ):
        table.add_row(what, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}", f">= {goal}")
        results.add(
            system="graphpool",
            model=MODEL,
            metric=f"speedup: {what}",
            unit="ratio",
            value=theirs / ours,
            scope="replica",
        )
    for system, batch, seconds in (
        ("graphpool_eager", 1, ours_one),
        ("hf_eager", 1, peer_one),
        ("graphpool_eager", STREAMS, ours_many),
        ("hf_eager", STREAMS, peer_batched),
    ):
        results.add(
            system=system,
            model=MODEL,
            batch=batch,
            metric="tokens_per_s",
            unit="1/s",
            value=batch * NEW_TOKENS / seconds,
            scope="replica",
        )
    for metric, value in footprint.items():
        results.add(
            system="graphpool_eager",
            model=MODEL,
            metric=metric,
            unit="B" if metric.endswith("bytes") else "s",
            value=value,
            scope="replica",
        )
    console.print(table)
    console.print(f"tokens equal: {results.correctness}")
    console.print(f"replica: {footprint['rss_bytes'] / 1e9:.2f} GB resident (goal <= 1.3); start-up {footprint}")
    console.print(f"wrote {results.write()}")


if __name__ == "__main__":
    main()
