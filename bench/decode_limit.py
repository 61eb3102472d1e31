"""How near decode steps come to the memory's speed, what each kernel takes of one, and what short tiers are good for.

    python -m bench.decode_limit [--models NAME ...] [--processes N]

Random bf16 weights of public shapes, bare steps from a graph, greedy. A step can be no faster than reading every weight
and the live cache once at the measured speed. Each step's logits are compared with those of torch's own kernels. Writes
`bench/results/decode_limit.json`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engine_runs import attempt, free_memory
from bench.kernel_shares import kernel_shares
from bench.kernels import CUDA, REPLAYS, DecodeBench, compare, native_model
from bench.options import bench_parser, parse_for_gpu
from bench.read_speed import cache_bytes, matrix_bytes, read_bytes_per_s, step_bytes
from bench.results_file import Results
from bench.shapes import SHAPES, write_config
from worker.causal_lm import CausalLM
from worker.model.architecture import DecoderConfig

CONTEXTS = (128, 1024, 4096, 16384)
BATCHES = {"llama-3.2-1b": (8, 32, 256)}
SPLIT_BATCHES = (1, 8, 32)
SPLIT_MODEL = "llama-3.2-1b"
PAY_OFF_CONTEXT, SHORT_TIER, LONG_TIER = 100, 256, 16384
PAY_OFF_BATCHES = (1, 32)
MAX_COMPARED_TOKENS = 64 * 1024
"""Torch's attention gathers and repeats the cache of all rows; more than this would not fit beside it."""
MAX_CACHE_BYTES = 60 << 30
Case = tuple[int, int]
"""Batch and context."""


def cases_of(name: str) -> Iterator[Case]:
    config = DecoderConfig.from_dict(SHAPES[name])
    for batch in (1, *BATCHES.get(name, ())):
        for context in CONTEXTS:
            fits = cache_bytes(config, batch, context) <= MAX_CACHE_BYTES
            if context <= config.max_position_embeddings and fits:
                yield batch, context


def first_context(context: int) -> int:
    """Where steps begin that stay within the tier of `context` while they are measured."""
    return context if context < SHORT_TIER else context - 2 * REPLAYS


def generic_model(name: str) -> CausalLM:
    """The same shape as transformers computes it."""
    from worker.generic.load import load_transformers
    from worker.model.source import resolve_model

    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(write_config(name, Path(folder))), load_format="dummy")
        return load_transformers(files, device=CUDA, dtype=torch.bfloat16, is_dummy=True, seed=0)


class LimitBench:
    """One model's steps."""

    def __init__(self, name: str, model: CausalLM, results: Results, bytes_per_s: float) -> None:
        self.name, self.model, self.results, self.bytes_per_s = name, model, results, bytes_per_s
        self.config = DecoderConfig.from_dict(SHAPES[name])

    def measure(self, batch: int, context: int) -> None:
        label, first = f"{self.name} b{batch} c{context}", first_context(context)
        if batch * context <= MAX_COMPARED_TOKENS:
            self.results.correctness[label] = compare(self.model, batch, first, way="shipped")
        step_us = 1e3 * DecodeBench(self.model, "triton", batch, first, way="shipped").step_ms(blocks=5)
        floor_us = 1e6 * step_bytes(self.config, batch, context) / self.bytes_per_s
        for system, us in (("graphpool", step_us), ("limit", floor_us)):
            self._add(system, batch, context, "decode_step_ms", us / 1e3, "ms")
        self._add("graphpool", batch, context, "share_of_read_speed", floor_us / step_us, "ratio")
        print(f"{label}: {step_us:.1f} us, floor {floor_us:.1f}, {floor_us / step_us:.3f}", flush=True)

    def split(self, batch: int, context: int) -> None:
        """The kernels of one step: microseconds, and the share of the read speed that each reaches."""
        bench = DecodeBench(self.model, "triton", batch, context, way="shipped")
        table = kernel_shares(bench, 1e3 * bench.step_ms(blocks=5))
        layers = self.config.num_layers
        bytes_of: dict[Any, int] = {
            kind: num * (1 if kind == "head" else layers) for kind, num in matrix_bytes(self.config).items()
        }
        bytes_of["attention"] = cache_bytes(self.config, batch, context)
        for line in table:
            line["bytes"] = bytes_of.get(line["kernel"], 0)
            line["share_of_read_speed"] = line["bytes"] / self.bytes_per_s / (1e-6 * line["us"])
            print(
                f"    {line['us']:8.1f} us {line['launches']:3d} x {line['kernel'][:40]:40s} {line['share_of_read_speed']:.3f}"
            )
        self.results.extra.setdefault("kernels", {})[f"{self.name} b{batch} c{context}"] = table

    def _add(self, system: str, batch: int, context: int, metric: str, value: float, unit: str) -> None:
        self.results.add(
            system=system, model=self.name, batch=batch, context=context, metric=metric, unit=unit, value=value,
            scope="step",
        )  # fmt: skip


def measure_tiers(model: CausalLM, path: str, results: Results) -> None:
    """What a step over short rows costs in a graph for long ones."""
    for batch in PAY_OFF_BATCHES:
        found = {
            tier: DecodeBench(model, "triton", batch, PAY_OFF_CONTEXT, tier, way="shipped").step_ms(blocks=3)
            for tier in (SHORT_TIER, LONG_TIER)
        }
        for tier, value in found.items():
            results.add(
                system=f"graphpool {path}", model=SPLIT_MODEL, batch=batch, context=PAY_OFF_CONTEXT,
                metric="decode_step_ms", unit="ms", value=value, scope="step", note=f"tier {tier}",
            )  # fmt: skip
        print(f"{path} b{batch}: {found}", flush=True)


def guarded(results: Results, label: str, work: Any, *arguments: Any) -> None:
    """One case that fails must not lose the others."""
    failed = attempt(work, *arguments)
    if failed is not None:
        results.correctness[label] = failed
    free_memory()
    results.write()


def compile_steps(job: tuple[str, Case]) -> None:
    """In a process of its own: leaves a step's kernels in Triton's cache. One layer has them all."""
    from worker.causal_lm import NativeCausalLM
    from worker.model.decoder import Decoder

    name, (batch, context) = job
    shape = SHAPES[name] | {"num_hidden_layers": 1}
    decoder = Decoder(DecoderConfig.from_dict(shape), dtype=torch.bfloat16, device=CUDA).eval()
    DecodeBench(NativeCausalLM(decoder), "triton", batch, first_context(context), way="shipped").step()


def compile_all(models: list[str], processes: int) -> None:
    """Before anything is measured, in as many processes."""
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_steps, [(name, case) for name in models for case in cases_of(name)], chunksize=1)
    print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--processes", type=int, default=12, help="that compile kernels beforehand, 0 = none")
    parser.add_argument("--no-tiers", action="store_true", help="leave out the comparison of tiers")
    options = parse_for_gpu(parser)
    if options.processes:
        compile_all(options.models, options.processes)
    results = Results(bench="decode_limit", hardware=torch.cuda.get_device_name())
    bytes_per_s = read_bytes_per_s(CUDA)
    results.extra["read_bytes_per_s"] = bytes_per_s
    print(f"reads {bytes_per_s / 1e12:.3f} TB/s", flush=True)
    for name in options.models:
        model: Any = native_model(name)
        bench = LimitBench(name, model, results, bytes_per_s)
        for batch, context in cases_of(name):
            guarded(results, f"{name} b{batch} c{context}", bench.measure, batch, context)
        for batch in SPLIT_BATCHES if name == SPLIT_MODEL else (1,):
            guarded(results, f"{name} b{batch} kernels", bench.split, batch, CONTEXTS[0])
        if name == SPLIT_MODEL and not options.no_tiers:
            guarded(results, "native tiers", measure_tiers, model, "native", results)
        del model, bench
        free_memory()
    if SPLIT_MODEL in options.models and not options.no_tiers:
        guarded(results, "generic tiers", lambda: measure_tiers(generic_model(SPLIT_MODEL), "generic", results))
    print(results.write())


if __name__ == "__main__":
    main()
