"""vLLM over a folder of weights, in a process of its own and with packages of its own; prints one line of JSON.

    PYTHONPATH=FOLDER_WITH_VLLM python bench/peer_vllm.py MODEL_FOLDER BATCH [BATCH ...]

Its engine as a library, without a server: CUDA graphs on, prefix cache off, greedy, nothing detokenised. Imports nothing
of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT, ANSWER = 128, 128


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """As bench.side_by_side makes them."""
    dice = random.Random(seed)
    return [[dice.randrange(100, 30_000) for _ in range(length)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="MODEL_FOLDER")
    parser.add_argument("batches", metavar="BATCH", type=int, nargs="+")
    options = parser.parse_args()
    folder, batches = options.folder, options.batches
    try:
        from vllm import LLM, SamplingParams, __version__
    except ImportError as error:
        parser.exit(1, f"{parser.prog}: needs vLLM: {error}\n")

    began = time.perf_counter()
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=8192,
        gpu_memory_utilization=0.5,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        dtype="bfloat16",
    )
    found: dict[str, Any] = {"version": __version__, "start_s": time.perf_counter() - began, "rows": []}

    def answer(batch: int, length: int, count: int, seed: int = 0) -> tuple[float, list[list[int]]]:
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, length, seed)]
        params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        done = llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - began, [list(one.outputs[0].token_ids) for one in done]

    found["answers"] = answer(4, PROMPT, 16)[1]
    for batch in batches:
        answer(batch, PROMPT, 16)
        first = median(answer(batch, PROMPT, 1)[0] for _ in range(7))
        whole = median(answer(batch, PROMPT, ANSWER + 1)[0] for _ in range(3))
        found["rows"] += [
            {"metric": "decode_step_ms", "unit": "ms", "batch": batch, "value": 1e3 * (whole - first) / ANSWER},
            {"metric": "tokens_per_s", "unit": "1/s", "batch": batch, "value": batch * (ANSWER + 1) / whole},
        ]
    for length in (128, 1024):
        answer(1, length, 1)
        took = median(answer(1, length, 1, seed)[0] for seed in range(9))
        found["rows"].append({"metric": "ttft_ms", "unit": "ms", "batch": 1, "context": length, "value": 1e3 * took})
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
