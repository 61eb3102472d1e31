"""What sampling adds to a decode step: the fused stage alone, and behind the step of a model, both from graphs.

    python -m bench.sampling [--model NAME] [--batches N ...]

Each kind of request is checked first: the fused stage and the plain one must choose the same tokens and leave the same
state. Writes `bench/results/sampling.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.clocks import captured, device_ms
from bench.kernels import CUDA, REPLAYS, DecodeBench, native_model
from bench.options import bench_parser, parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from tests.fakes.sampled_rows import Rows, sequence
from worker import sampler
from worker.causal_lm import CausalLM
from worker.decode_step import decode_step
from worker.kernels.sample import sample
from worker.sampling import SamplingParams
from worker.sampling_needs import ALL_NEEDS, DRAW_NEEDS, Need
from worker.sampling_views import SamplingViews

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "5 log-probabilities": {"temperature": 0.8, "logprobs": 5},
    "all of it": {
        "temperature": 0.8,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logprobs": 5,
        "logit_bias": {7: 1.0, 900: -1.0},
        "min_tokens": 1000,
        "stop_token_ids": (9,),
    },
}
SPREADS = {"flat": 1.0, "peaked": 3.0}
"""Standard deviations of logits: as random weights make them, and about as trained ones do."""
HISTORY = 500
"""Tokens behind each row."""
CONTEXT = 128
MAX_PLAIN = 32
"""Rows up to which plain torch is measured as well: it sorts every row."""


def rows_of(kind: str, logits: torch.Tensor) -> Rows:
    """One row of `kind` for each row of logits."""
    vocab = logits.shape[1]
    history = [(7919 * i) % vocab for i in range(HISTORY)]
    made = [
        sequence(SamplingParams(seed=seed, **KINDS[kind]), history[:128], history[128:]) for seed in range(len(logits))
    ]
    return Rows(made, logits)


def launched_for(needs: Need) -> Need:
    """What the graph offers that a worker replays for such rows."""
    return ALL_NEEDS if needs & ~DRAW_NEEDS else DRAW_NEEDS


def is_equal_to_plain(rows: Rows) -> bool:
    """Whether the fused stage does what the plain one does."""
    plain, fused = rows.copy(), rows.copy()
    expected, found = sampler.sample(rows.logits, plain), sample(rows.logits, fused)
    state = ("whole", "counts", "last_tokens")
    return torch.equal(expected[0], found[0]) and all(
        torch.equal(getattr(plain, name), getattr(fused, name)) for name in state
    )


def graph_us(*graphs: torch.cuda.CUDAGraph, before: Callable[[], None] = lambda: None) -> float:
    """Device microseconds of one replay of all `graphs` in turn, behind each other in a queue."""

    def replays() -> None:
        before()
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()

    return 1e3 * device_ms(replays, rounds=1, blocks=7) / REPLAYS


class StepBench(DecodeBench):
    """A decode step that leaves its logits and tokens where the stage of `rows` finds them."""

    def __init__(self, model: CausalLM, batch: int) -> None:
        super().__init__(model, "triton", batch, CONTEXT, tier=1024, way="shipped")
        self.logits = torch.zeros(batch, model.shape.vocab_size, device=CUDA)

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        views = replace(self.inputs.views(self.batch, self.width), logits=self.logits)
        logits, _ = decode_step(self.model, self.kernels, views)
        if logits.data_ptr() != self.logits.data_ptr():
            self.logits.copy_(logits)
        return logits

    def rows(self, kind: str) -> tuple[Rows, SamplingViews]:
        self.step()
        rows = rows_of(kind, self.logits)
        places = torch.arange(self.batch, device=CUDA)
        rows.views.places[:, 0].copy_(places)
        rows.views.places[:, 1].copy_(places)
        return rows, replace(rows.views, last_tokens=self.inputs.last_tokens)


def measure_stage(results: Results, model: str, batch: int, vocab: int) -> None:
    """The stage alone, over random logits of both shapes."""
    for shape, spread in SPREADS.items():
        for kind in KINDS:
            rows = rows_of(kind, random_logits(batch, vocab, spread))
            results.correctness[f"{kind}, {shape}, batch {batch}"] = is_equal_to_plain(rows)
            value = graph_us(captured(partial(sample, rows.logits, rows.views, launched_for(rows.needs))))
            note_stage(results, "graphpool", model, batch, f"{kind}, {shape}", value)


def measure_plain_stage(results: Results, model: str, batch: int, vocab: int) -> None:
    """The same in plain torch, operation by operation."""
    rows = rows_of("all of it", random_logits(batch, vocab, SPREADS["flat"]))
    value = graph_us(captured(partial(sampler.sample, rows.logits, rows.views)))
    note_stage(results, "torch", model, batch, "any, flat", value)


def random_logits(batch: int, vocab: int, spread: float) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(batch)
    return torch.randn(batch, vocab, device=CUDA, generator=generator) * spread


def note_stage(results: Results, system: str, model: str, batch: int, note: str, value: float) -> None:
    values = {"system": system, "model": model, "batch": batch, "note": note, "value": value}
    results.add(**values, metric="sampling_us", unit="us", scope="step")
    print(f"batch {batch:4} {note:32} {system:10} {value:8.1f} us", flush=True)


def measure_step(results: Results, name: str, model: CausalLM, batch: int) -> None:
    """The step of a model without the stage, and with it behind."""
    bench = StepBench(model, batch)
    step = captured(bench.step)
    alone = graph_us(step, before=bench.reset)
    found = [("greedy", alone)]
    for kind in KINDS:
        rows, views = bench.rows(kind)
        stage = captured(partial(sample, bench.logits, views, launched_for(rows.needs)))
        found.append((kind, graph_us(step, stage, before=bench.reset)))
    for kind, value in found:
        results.add(
            system="graphpool",
            model=name,
            batch=batch,
            context=CONTEXT,
            metric="decode_step_ms",
            unit="ms",
            value=value / 1e3,
            scope="step",
            note=kind,
        )
        print(f"batch {batch:4} {kind:32} step {value:8.1f} us, {value - alone:+6.1f}", flush=True)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    arguments = parse_for_gpu(parser)
    results = Results(bench="sampling", hardware=torch.cuda.get_device_name(CUDA))
    model = native_model(arguments.model)
    with torch.inference_mode():
        for batch in arguments.batches:
            measure_step(results, arguments.model, model, batch)
            measure_stage(results, arguments.model, batch, model.shape.vocab_size)
        assert all(results.correctness.values()), results.correctness
        for batch in arguments.batches:
            if batch <= MAX_PLAIN:
                measure_plain_stage(results, arguments.model, batch, model.shape.vocab_size)
    print(results.write())


if __name__ == "__main__":
    main()
