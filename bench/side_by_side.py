"""graphpool, transformers and vLLM on the same GPU over the same weights, one after another in one run.

    python -m bench.side_by_side [--models llama-3.2-1b ...] [--vllm FOLDER]

Random bf16 weights of public shapes, saved once and loaded by everybody; 128 prompt and 128 new tokens, greedy. All three
as libraries, without a server: milliseconds of a decode step and tokens/s of a burst at batch 1, 8, 32 and 256, time to
first token of an idle engine. transformers is its StaticCache captured in a CUDA graph, prompts eagerly. vLLM is found in
FOLDER, a site-packages of its own, and left out without one. Each in a process of its own, so that none leaves memory to
the next. First tokens are compared with those of transformers. Writes `bench/results/side_by_side.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.options import bench_parser, folder_path, parse_for_gpu
from bench.peer_vllm import ANSWER, PROMPT, prompts
from bench.results_file import Results, versions
from bench.shapes import SHAPES

BATCHES = (1, 8, 32, 256)
LIMIT_S = 150
MARK = "RESULT "

Found = dict[str, Any]


def transformers_peer(name: str, folder: Path) -> Found:
    """StaticCache in a graph; also makes the weights, and the first tokens that others are compared with."""
    import torch

    from bench.graph_vs_eager import save
    from bench.peers import hf_graph_step_ms, hf_model, hf_prefill_ms

    model = hf_model(name)
    shutil.move(str(save(name, model)), folder)
    with torch.no_grad():
        firsts = [
            int(model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1].argmax())
            for ids in prompts(4, PROMPT, 0)
        ]
    rows = [
        {"metric": "decode_step_ms", "unit": "ms", "batch": batch, "value": hf_graph_step_ms(model, batch)}
        for batch in BATCHES
    ]
    rows += [
        {"metric": "ttft_ms", "unit": "ms", "batch": 1, "context": length, "value": hf_prefill_ms(model, length)}
        for length in (128, 1024)
    ]
    return {"rows": rows, "answers": [[first] for first in firsts]}


def graphpool(folder: Path) -> Found:
    """The engine with every graph captured, tokens held back as a replica does."""
    from bench.engine_runs import answers, decode_step_ms, start
    from bench.engine_speed import Hold, burst_tokens_per_s, ttft_ms
    from worker.config import WorkerConfig

    hold = Hold()
    config = WorkerConfig(
        model=str(folder), device="cuda", max_batch=256, max_model_len=8192, kv_cache_bytes=24 << 30, prefix_cache=False
    )
    worker = start(config, hold_s=hold)
    engine = worker.engine
    found = answers(engine, prompts(4, PROMPT, 0), 16)
    rows: list[Found] = []
    hold.is_on = True
    for batch in BATCHES:
        step_ms = decode_step_ms(engine, batch, PROMPT, ANSWER, "cuda")
        burst = median(burst_tokens_per_s(engine, batch) for _ in range(3))
        rows.append({"metric": "decode_step_ms", "unit": "ms", "batch": batch, "value": step_ms})
        rows.append({"metric": "tokens_per_s", "unit": "1/s", "batch": batch, "value": burst})
    hold.is_on = False
    rows += [
        {"metric": "ttft_ms", "unit": "ms", "batch": 1, "context": length, "value": ttft_ms(engine, length)}
        for length in (128, 1024)
    ]
    return {"rows": rows, "answers": [found[str(row)] for row in range(4)], "start_s": worker.load_s + worker.capture_s}


def vllm_peer(site: Path, folder: Path) -> Found:
    """See bench.peer_vllm."""
    here = Path(__file__).parent / "peer_vllm.py"
    return read([sys.executable, "-P", str(here), str(folder), *map(str, BATCHES)], {"PYTHONPATH": str(site)})


def read(command: list[str], changes: dict[str, str]) -> Found:
    """The JSON that a process prints; what else it prints is passed on."""
    done = subprocess.run(
        command, env=os.environ | changes, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))  # type: ignore[no-any-return]
    raise RuntimeError(f"{command[1:3]} ended with {done.returncode}: {done.stdout[-1500:]}")


def by_itself(system: str, name: str, folder: Path) -> Found:
    """The same function in a process of its own."""
    return read([sys.executable, "-m", "bench.side_by_side", str(folder), "--only", system, "--models", name], {})


def compare(name: str, folder: Path, site: Path | None, results: Results) -> None:
    """All systems over the weights of one shape."""
    systems: dict[str, Callable[[], Found]] = {
        "hf_static_graph": partial(by_itself, "transformers", name, folder),
        "graphpool": partial(by_itself, "graphpool", name, folder),
    }
    if site is not None:
        systems["vllm"] = partial(vllm_peer, site, folder)
    expected: list[int] = []
    for system, run in systems.items():
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 a peer that fails must not lose the others
            traceback.print_exc()
            results.correctness[f"{name} {system}"] = f"failed: {error}"[:400]
            continue
        firsts = [answer[0] for answer in found["answers"]]
        expected = expected or firsts
        equal = sum(a == b for a, b in zip(firsts, expected, strict=True))
        results.correctness[f"{name} {system}"] = f"{equal} of {len(expected)} first tokens equal"
        if "version" in found:
            results.extra["versions"] = versions() | {"vllm": found["version"]}
        for row in found["rows"]:
            results.add(system=system, model=name, scope="replica", **row)
            print(system, name, row, flush=True)
        results.write()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b"], choices=list(SHAPES))
    parser.add_argument("--vllm", type=folder_path, help="folder of packages that holds vLLM")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("folder", type=folder_path, nargs="?", help=argparse.SUPPRESS)
    options = parse_for_gpu(parser)
    if options.only:
        (name,) = options.models
        one = graphpool(options.folder) if options.only == "graphpool" else transformers_peer(name, options.folder)
        print(MARK + json.dumps(one), flush=True)
        return
    from bench.replica_grpc import hardware

    results = Results(bench="side_by_side", hardware=hardware("cuda"))
    scratch = Path("/dev/shm/graphpool-side-by-side")
    for name in options.models:
        shutil.rmtree(scratch, ignore_errors=True)
        compare(name, scratch, options.vllm, results)
    shutil.rmtree(scratch, ignore_errors=True)
    print(results.correctness, results.write())


if __name__ == "__main__":
    main()
