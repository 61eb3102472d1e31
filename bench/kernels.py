"""Decode steps over fused kernels: whole steps from a graph, what each kernel takes, and other attention plans.

    python -m bench.kernels [--models NAME ...] [--batches N ...] [--contexts N ...] [--plans]

Random bf16 weights of public shapes. Each step's logits are compared with those of torch's own kernels. Writes
`bench/results/kernels.json`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from bench.clocks import captured, device_ms
from bench.engine_runs import attempt, free_memory
from bench.options import bench_parser, parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.causal_lm import CausalLM, NativeCausalLM
from worker.config import Kernels
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.kv_cache import KVCache
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.load import randomise
from worker.step_kernels import choose_kernels

if TYPE_CHECKING:
    from torch.profiler import profile

BLOCK_SIZE = 16
TIERS = (256, 1024, 4096, 16384)
KERNELS: tuple[Kernels, ...] = ("triton", "torch")
REPLAYS = 40
Way = Literal["shipped", "parts", "vector", "rows", "blocks"]
"""How a step is computed: as the product chooses, cuBLAS with fused kernels around it, or one of the whole-step ways."""
WAYS: tuple[Way, ...] = ("parts", "vector", "rows", "blocks")
MAX_ROWS_OF: dict[Way, int] = {"shipped": 1 << 20, "parts": 1 << 20, "vector": 4, "rows": 16, "blocks": 128}
"""More rows are not measured that way."""
CUDA = torch.device("cuda", 0)


def limits_of(way: Way, batch: int) -> dict[str, int]:
    """Arguments of choose_kernels with which `batch` rows go that way."""
    limits = {"vector": "gemv_rows", "rows": "product_rows", "blocks": "block_rows"}
    if way == "shipped":
        return {}
    return dict.fromkeys(limits.values(), 0) | ({limits[way]: batch} if way in limits else {})


@contextmanager
def cublas_alone() -> Iterator[None]:
    """Inside, forward passes of a few tokens multiply as those of many do."""
    from worker.model import block_forward

    module: Any = block_forward
    original, module.MAX_TOKENS = module.MAX_TOKENS, 0
    try:
        yield
    finally:
        module.MAX_TOKENS = original


class DecodeBench:
    """One captured decode step of `batch` rows that all stand at `context`."""

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        batch: int,
        context: int,
        tier: int | None = None,
        *,
        way: Way = "parts",
    ) -> None:
        self.model, self.batch, self.context, self.way = model, batch, context, way
        self.width = (tier or next(tier for tier in TIERS if tier >= context + 2 * REPLAYS)) // BLOCK_SIZE
        used = min(-(-(context + 2 * REPLAYS) // BLOCK_SIZE), self.width)
        shape = model.shape
        self.cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=batch * used + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        self.cache.storage.normal_(generator=torch.Generator(CUDA).manual_seed(0))
        self.kernels = choose_kernels(
            kernels, self.cache, num_heads=shape.num_heads, max_rows=batch, **limits_of(way, batch)
        )
        self.inputs = DecodeInputs(max_batch=batch, max_blocks=self.width, block_size=BLOCK_SIZE, device=CUDA)
        order = torch.randperm(batch * used, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(batch, used).numpy()
        self.reset()

    def reset(self) -> None:
        host = self.inputs.staging.writable()
        host["positions"][...] = self.context - 1
        host["token_ids"][...] = range(3, 3 + self.batch)
        host["live"][...], host["sources"][...], host["block_tables"][...] = 1, -1, 0
        host["block_tables"][:, : self.tables.shape[1]] = self.tables
        self.inputs.staging.upload()

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        with cublas_alone() if self.way == "parts" else nullcontext():
            return decode_step(self.model, self.kernels, self.inputs.views(self.batch, self.width))[0]

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = captured(self.step)
        self.reset()
        return graph

    def step_ms(self, blocks: int = 7) -> float:
        graph = self.capture()

        def replays() -> None:
            self.reset()
            for _ in range(REPLAYS):
                graph.replay()

        return device_ms(replays, rounds=1, blocks=blocks) / REPLAYS

    def profiled(self, rounds: int) -> profile:
        """What the profiler saw of so many replays."""
        from torch.profiler import ProfilerActivity, profile

        graph = self.capture()
        graph.replay()
        torch.cuda.synchronize()
        profiler: profile
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(rounds):
                graph.replay()
            torch.cuda.synchronize()
        return profiler

    def kernel_table(self) -> list[dict[str, Any]]:
        """Microseconds and launches of every kernel in one step, from the profiler's view of replays."""
        rounds = 10
        profiler = self.profiled(rounds)
        rows = [
            {"kernel": event.key[:90], "launches": event.count / rounds, "us": event.device_time_total / rounds}
            for event in profiler.key_averages()
            if event.device_time_total
        ]
        return sorted(rows, key=lambda row: -row["us"])


def native_model(name: str) -> CausalLM:
    decoder = Decoder(DecoderConfig.from_dict(SHAPES[name]), dtype=torch.bfloat16, device=CUDA).eval()
    randomise(decoder, 0)
    return NativeCausalLM(decoder)


def compare(model: CausalLM, batch: int, context: int, *, way: Way = "parts") -> dict[str, float]:
    """Relative distance of the logits of both kinds of kernels, and the share of equal tokens."""
    ours = DecodeBench(model, "triton", batch, context, way=way).step()
    theirs = DecodeBench(model, "torch", batch, context).step()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return {"relative": float((ours - theirs).norm() / theirs.norm()), "same_tokens": float(same)}


@contextmanager
def plan_changes(**changes: Any) -> Iterator[None]:
    """Attention plans are changed inside; 0 splits leaves the number to the plan."""
    from worker.kernels import decode_attention

    module: Any = decode_attention
    original = module.split_plan
    kept = {name: value for name, value in changes.items() if value}

    def changed(**shape: Any) -> Any:
        return replace(original(**shape), **kept)

    module.split_plan = changed
    try:
        yield
    finally:
        module.split_plan = original


def attention_ms(model: CausalLM, batch: int, context: int, tier: int | None = None) -> float:
    """Milliseconds of the attention of all layers alone, from a graph."""
    from worker.model.fused import layer_layout  # imports triton

    bench = DecodeBench(model, "triton", batch, context, tier)
    decoder: Any = model.module
    views = bench.inputs.views(batch, bench.width)
    attend: Any = bench.kernels.decode(views)
    qkv = torch.randn(batch, decoder.config.qkv_heads * decoder.config.head_dim, device=CUDA).to(torch.bfloat16)
    layouts = [layer_layout(layer, decoder.rope_table) for layer in decoder.layers]

    def layers() -> None:
        for index, layout in enumerate(layouts):
            attend.attend_qkv(index, qkv, views.positions, layout)

    return device_ms(captured(layers).replay, rounds=20, blocks=5)


def sweep_plans(model: CausalLM, batch: int, context: int, tier: int | None) -> list[dict[str, Any]]:
    """Attention time of every plan that compiles, best first."""
    found: list[dict[str, Any]] = [{"plan": "shipped", "us": 1e3 * attention_ms(model, batch, context, tier)}]
    for tile, warps, stages in itertools.product((64, 128), (4, 8), (2, 3)):
        for min_chunk, splits in ((128, 0), (256, 0), (512, 0), (128, 8)):
            if min_chunk % tile or (splits and splits * batch > 256):
                continue
            kinds = {"tile": tile, "num_warps": warps, "num_stages": stages}
            changes = kinds | {"min_chunk": min_chunk, "num_splits": splits}
            try:
                with plan_changes(**changes):
                    found.append({"plan": changes, "us": 1e3 * attention_ms(model, batch, context, tier)})
            except Exception as error:  # noqa: BLE001 - too much shared memory, or too small a workspace
                found.append({"plan": changes, "us": float("inf"), "error": str(error)[:100]})
    return sorted(found, key=lambda row: row["us"])


def prefill_ms(model: CausalLM, kernels: Kernels, length: int) -> float:
    """A captured prompt of `length` tokens up to its first token."""
    bench = DecodeBench(model, kernels, 1, length)
    positions = torch.arange(length, device=CUDA)
    token_ids = torch.randint(3, model.shape.vocab_size, (length,), device=CUDA)
    last = torch.tensor([length - 1], device=CUDA)

    @torch.inference_mode()
    def step() -> None:
        attend = bench.kernels.fresh(slots=positions + BLOCK_SIZE)
        bench.kernels.greedy(model.compute(token_ids, positions, attend, last))

    return device_ms(captured(step).replay, rounds=20, blocks=5)


class ModelBench:
    """Everything that is measured of one model."""

    def __init__(self, name: str, results: Results) -> None:
        self.name, self.results = name, results
        self.model = native_model(name)

    def guarded(self, label: str, work: Callable[..., None], *arguments: Any) -> None:
        """One case that fails must not lose the others."""
        failed = attempt(work, label, *arguments)
        if failed is not None:
            self.results.correctness[label] = failed
        free_memory()
        sys.stdout.flush()

    def add(self, kernels: str, batch: int, context: int, metric: str, value: float) -> None:
        self.results.add(
            system=f"graphpool_{kernels}",
            model=self.name,
            batch=batch,
            context=context,
            metric=metric,
            unit="ms",
            value=value,
            scope="step",
        )

    def measure_step(self, label: str, batch: int, context: int) -> None:
        self.results.correctness[label] = compare(self.model, batch, context)
        values: dict[str, float] = {
            kernels: DecodeBench(self.model, kernels, batch, context).step_ms() for kernels in KERNELS
        }
        for way in (way for way in WAYS[1:] if batch <= MAX_ROWS_OF[way]):
            self.results.correctness[f"{label} {way}"] = compare(self.model, batch, context, way=way)
            print(label, way, self.results.correctness[f"{label} {way}"])
            values[way] = DecodeBench(self.model, "triton", batch, context, way=way).step_ms()
        for kernels, value in values.items():
            self.add(kernels, batch, context, "decode_step_ms", value)
        print(label, {key: round(value, 4) for key, value in values.items()}, self.results.correctness[label])

    def measure_prefill(self, label: str, length: int) -> None:
        values = {kernels: prefill_ms(self.model, kernels, length) for kernels in KERNELS}
        for kernels, value in values.items():
            self.add(kernels, 1, length, "prefill_ms", value)
        print(label, {key: round(value, 4) for key, value in values.items()})

    def measure_kernels(self, label: str, batch: int, context: int) -> None:
        table = DecodeBench(self.model, "triton", batch, context, way="shipped").kernel_table()
        self.results.extra.setdefault("kernels", {})[label] = table
        for row in table[:14]:
            print(f"    {row['us']:9.2f} us {row['launches']:6.1f} x  {row['kernel'][:70]}")

    def measure_plans(self, label: str, batch: int, context: int, tier: int | None) -> None:
        found = sweep_plans(self.model, batch, context, tier)
        self.results.extra.setdefault("plans", {})[label] = found
        shipped = next(row["us"] for row in found if row["plan"] == "shipped")
        print(label, f"shipped {shipped:.1f} us;", "; ".join(f"{row['us']:.1f} {row['plan']}" for row in found[:5]))

    def run(self, batches: Sequence[int], contexts: Sequence[int], prompts: Sequence[int], *, plans: bool) -> None:
        for batch, context in itertools.product(batches, contexts):
            label = f"{self.name} b{batch} c{context}"
            self.guarded(label, self.measure_step, batch, context)
            self.guarded(f"{label} kernels", self.measure_kernels, batch, context)
            for tier in (None, TIERS[-1]) if plans else ():
                self.guarded(f"{label} tier {tier}", self.measure_plans, batch, context, tier)
        for length in prompts:
            self.guarded(f"{self.name} prefill {length}", self.measure_prefill, length)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128])
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 1024])
    parser.add_argument("--plans", action="store_true", help="also try other attention plans")
    parser.add_argument("--name", default="kernels", help="of the result file")
    options = parse_for_gpu(parser)
    results = Results(bench=options.name, hardware=torch.cuda.get_device_name())
    for name in options.models:
        bench = ModelBench(name, results)
        bench.run(options.batches, options.contexts, options.prompts, plans=options.plans)
        del bench
        free_memory()
    print(results.write())


if __name__ == "__main__":
    main()
