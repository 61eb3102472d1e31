"""The embedded model's own text: GPU graphs in bfloat16 and float32 against the CPU in float32, greedy, 20 prompts.

    python -m bench.graph_text --model DIR        (DIR: the converted model, `python -m worker.model.fetch`)
    python -m bench.graph_text --reference        (makes bench/data/smollm2_greedy.json on the CPU, with transformers)

The reference holds token ids, and for each place the gap between the two largest logits. A first difference counts as a
near-tie when the GPU chose the reference's runner-up and the gap is within what the type cannot tell apart; every
difference is listed with its gap. After the first one the texts are different texts, so each place is also compared by
itself: the reference's own tokens up to it as the prompt, one token asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine_runs import Worker, answers, free_memory, hardware, parser, start
from bench.options import parse_for_gpu, some_of
from bench.results_file import Results
from worker.config import Device, Dtype, WorkerConfig

REFERENCE = Path(__file__).resolve().parent / "data" / "smollm2_greedy.json"
NEW_TOKENS = 48
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.5}
"""Largest gap, in logits, that the type may turn around."""
QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is the capital of Portugal?",
    "Explain photosynthesis to a child.",
    "Name three uses of copper.",
    "How do I boil an egg?",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "What is seven times eight?",
    "Describe the water cycle.",
    "Translate 'good morning' into French.",
    "Why do cats purr?",
    "What is a prime number?",
    "Tell me a short story about a lighthouse.",
    "How does a bicycle stay upright?",
)
BEGINNINGS = (
    "The three laws of motion say that",
    "Once upon a time there was",
    "def fibonacci(n):\n",
    "The best way to learn a language is",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of the reference."""

    prompt: list[int]
    tokens: list[int]
    runners_up: list[int]
    gaps: list[float]


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--reference", action="store_true", help="make the reference instead")
    options.add_argument("--dtypes", type=some_of(NEAR_TIE), default="bfloat16,float32")
    options.add_argument("--prompts", type=int, help="only the first so many")
    options.add_argument("--places", type=int, default=NEW_TOKENS, help="of each prompt, one by one")
    args = parse_for_gpu(options, arguments)
    if args.reference:
        return make_reference(args.model)
    lines = [Line(**line) for line in json.loads(REFERENCE.read_text())["lines"]][: args.prompts]
    results = Results(bench="graph_text", hardware=hardware(args.device))
    for dtype in args.dtypes:
        found = compare(args.model, dtype, args.device, lines, args.places)
        results.correctness[dtype] = found
        for metric in ("same_texts", "same_places", "near_ties", "unexplained"):
            results.add(
                system="graphpool", model="smollm2-135m", metric=metric, unit="1", value=found[metric], scope="replica",
                note=dtype,
            )  # fmt: skip
        print(dtype, json.dumps(found, indent=1), flush=True)
        free_memory()
    return results.write(args.out)


def compare(model: str, dtype: Dtype, device: Device, lines: Sequence[Line], num_places: int) -> dict[str, Any]:
    worker = text_worker(model, dtype, device)
    texts = answers(worker.engine, [line.prompt for line in lines], NEW_TOKENS)
    differences = [
        found
        for number, line in enumerate(lines)
        if (found := first_difference(number, line, texts[str(number)], NEAR_TIE[dtype])) is not None
    ]
    places = one_by_one(worker, lines, num_places)
    turned = [place for place in places if place["chosen"] != place["expected"]]
    found = {
        "prompts": len(lines),
        "same_texts": len(lines) - len(differences),
        "near_ties": sum(each["is_near_tie"] for each in differences),
        "unexplained": sum(not each["is_near_tie"] for each in differences),
        "differences": differences,
        "places": len(places),
        "same_places": len(places) - len(turned),
        "largest_gap_turned": max((place["gap"] for place in turned), default=0.0),
        "keys_quarantined": len(worker.runner.dispatcher.quarantined),
        "misses": sum(worker.runner.dispatcher.misses.values()),
    }
    worker.close()
    return found


def text_worker(model: str, dtype: Dtype, device: Device) -> Worker:
    """All graphs captured; on the CPU they are emulated."""
    graphs: dict[str, Any] = {"graphs": "auto" if device == "cuda" else "fake"}
    return start(
        WorkerConfig(
            model=model,
            device=device,
            dtype=dtype,
            max_model_len=256 if device == "cuda" else 128,
            max_batch=32 if device == "cuda" else 1,
            prefill_chunk=64 if device == "cuda" else 32,
            kv_cache_bytes=1 << 30,
            capture="startup",
            **graphs,
        )
    )


def first_difference(number: int, line: Line, tokens: list[int], limit: float) -> dict[str, Any] | None:
    """Where the answer leaves the reference, if it does."""
    for place, (expected, chosen) in enumerate(zip(line.tokens, tokens, strict=True)):
        if chosen != expected:
            gap = line.gaps[place]
            is_near_tie = chosen == line.runners_up[place] and gap <= limit
            return {
                "prompt": number, "place": place, "expected": expected, "chosen": chosen, "gap": gap,
                "is_near_tie": is_near_tie,
            }  # fmt: skip
    return None


def one_by_one(worker: Worker, lines: Sequence[Line], num_places: int) -> list[dict[str, Any]]:
    """Every place of the reference, asked for alone."""
    asked = [
        (line.prompt + line.tokens[:place], line.tokens[place], line.gaps[place])
        for line in lines
        for place in range(min(num_places, len(line.tokens)))
    ]
    found = []
    for first in range(0, len(asked), 32):
        group = asked[first : first + 32]
        tokens = answers(worker.engine, [ids for ids, _, _ in group], 1)
        for number, (_, expected, gap) in enumerate(group):
            found.append({"expected": expected, "chosen": tokens[str(number)][0], "gap": gap})
    return found


def make_reference(model: str) -> Path:
    """Greedy tokens of transformers in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    from worker.model.source import resolve_model
    from worker.text.processor import TextProcessor

    files = resolve_model(model)
    text = TextProcessor.from_files(files)
    peer = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32).eval()
    prompts = [text.render_chat([("user", question)]) for question in QUESTIONS]
    prompts += [text.encode(beginning) for beginning in BEGINNINGS]
    lines = []
    for ids in prompts:
        lines.append(greedy(peer, list(ids)))
        print(len(lines), text.decode(lines[-1]["tokens"])[:70].replace("\n", " "), flush=True)
    document = {
        "model": "SmolLM2-135M-Instruct",
        "made_by": "python -m bench.graph_text --reference",
        "new_tokens": NEW_TOKENS,
        "lines": lines,
    }
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(json.dumps(document) + "\n")
    return REFERENCE


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    """Tokens, runners-up and gaps; end-of-text tokens are answers like any other."""
    found: dict[str, Any] = {"prompt": ids, "tokens": [], "runners_up": [], "gaps": []}
    output = model(input_ids=torch.tensor([ids]), use_cache=True)
    for _ in range(NEW_TOKENS):
        top = output.logits[0, -1].topk(2)
        token = int(top.indices[0])
        found["tokens"].append(token)
        found["runners_up"].append(int(top.indices[1]))
        found["gaps"].append(round(float(top.values[0] - top.values[1]), 5))
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    return found


if __name__ == "__main__":
    print(main())
