"""Which tiles the kernels of whole decode steps should have on this GPU.

    python -m bench.decode_tiles [--models NAME ...] [--ways vector rows blocks] [--rows N ...] [--processes N]

Measures every candidate alone, over the weights of all layers, then the best few inside whole steps, and prints the
entries of TILES in `worker.kernels.vector_tiles`, `row_tiles` and `block_tiles`, and for one row that of PLANS in
`short_plan`. Writes `bench/results/decode_tiles.json`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bench.clocks import device_ms
from bench.engine_runs import free_memory
from bench.kernels import CUDA, DecodeBench, Way, native_model
from bench.options import bench_parser, parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.causal_lm import CausalLM
from worker.kernels import block_tiles, row_tiles, short_plan, vector_tiles
from worker.kernels.block_tiles import BlockTile
from worker.kernels.device import num_sms
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.row_tiles import RowTile
from worker.kernels.short_plan import ShortPlan
from worker.model.architecture import DecoderConfig

CONTEXT = 128
BEST_ALONE = 3
EPS = 1e-5
KINDS: tuple[MatrixKind, ...] = ("gate_up", "down", "qkv", "o", "head")
Tile = vector_tiles.Tile | RowTile | BlockTile
Job = tuple[str, Way, int, MatrixKind, Tile]
LOOKUPS = {
    "vector": "worker.model.vector_step.tile_for",
    "rows": "worker.model.rows_step.row_tile_for",
    "blocks": "worker.model.block_step.block_tile_for",
}
ROWS_OF: dict[str, tuple[int, ...]] = {"vector": (1,), "rows": (8, 16), "blocks": (16, 32, 64, 128)}
"""Rows that are worth measuring that way."""


def config_of(name: str) -> DecoderConfig:
    return DecoderConfig.from_dict(SHAPES[name])


def shapes_of(name: str) -> dict[MatrixKind, tuple[int, int]]:
    from worker.model.matrix_tiles import matrix_shapes

    return matrix_shapes(config_of(name))


def matrix_weights(decoder: Any, kind: MatrixKind) -> list[torch.Tensor]:
    if kind == "head":
        return [decoder.lm_head] * 3
    return [getattr(layer, f"{kind}_weight") for layer in decoder.layers]


def shipped_tile(name: str, way: Way, rows: int, kind: MatrixKind) -> Tile | None:
    size, out = shapes_of(name)[kind]
    if way == "vector":
        return vector_tiles.tile_for(kind, size, out, rows)
    return (row_tiles.row_tile_for if way == "rows" else block_tiles.block_tile_for)(kind, size, out, rows)


def candidates(name: str, way: Way, rows: int, kind: MatrixKind) -> list[Tile]:
    """Tiles worth measuring, the shipped one among them."""
    size, _ = shapes_of(name)[kind]
    columns = block_tiles.columns_for(rows)
    found: dict[Tile, None] = {}
    if way == "vector":
        found |= dict.fromkeys(vector_tiles.candidates(kind, size, head_dim=config_of(name).head_dim))
    if way == "rows":
        found |= dict.fromkeys(row_tiles.candidates(kind, size, columns))
    if way == "blocks":
        found |= dict.fromkeys(block_tiles.candidates(kind, size, columns))
    shipped = shipped_tile(name, way, rows, kind)
    return list(found | ({shipped: None} if shipped else {}))


class MatrixBench:
    """One kind of matrix, with `rows` vectors."""

    def __init__(self, name: str, way: Way, rows: int, kind: MatrixKind, weights: list[torch.Tensor]) -> None:
        size, outputs = shapes_of(name)[kind]
        dtype = torch.bfloat16
        self.way, self.kind, self.rows, self.outputs, self.weights = way, kind, rows, outputs, weights
        self.columns = block_tiles.columns_for(rows)
        self.x = torch.randn(rows, size, device=CUDA).to(dtype)
        self.wide = torch.zeros(rows, outputs, device=CUDA)
        self.narrow = torch.zeros(rows, outputs, dtype=dtype, device=CUDA)
        self.best = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        self.scale = torch.ones(max(outputs, size), dtype=dtype, device=CUDA)
        self.residual = torch.zeros(rows, outputs, device=CUDA)
        self.partials: Any = self._partials(config_of(name)) if (way, kind) == ("vector", "o") else None

    def launch(self, weight: torch.Tensor, tile: Tile) -> None:
        if isinstance(tile, RowTile):
            self._launch_rows(weight, tile)
        elif isinstance(tile, BlockTile):
            self._launch_block(weight, tile)
        else:
            self._launch_vector(weight, tile)

    def _launch_vector(self, weight: torch.Tensor, tile: vector_tiles.Tile) -> None:
        from worker.kernels import gemv

        norm = gemv.Norm(weight=self.scale[: weight.shape[1]], eps=EPS)
        if self.kind == "qkv":
            gemv.gemv(self.x, weight, tile, norm=norm, out=self.wide)
        elif self.kind == "o":
            gemv.gemv_merge_add(self.partials, weight, tile, residual=self.residual, out=self.narrow)
        elif self.kind == "gate_up":
            gemv.gemv_gated(self.x, weight, tile, norm=norm, out=self.narrow)
        elif self.kind == "down":
            gemv.gemv_add(self.x, weight, tile, residual=self.residual, out=self.narrow)
        else:
            gemv.gemv_logits(self.x, weight, tile, norm=norm, out=self.wide, best=self.best)

    def _launch_rows(self, weight: torch.Tensor, tile: RowTile) -> None:
        from worker.kernels import rows_product
        from worker.kernels.rows_product import ScaledRows

        vectors = ScaledRows(x=self.x, squares=self._scratch(128, self.columns))
        if self.kind == "qkv":
            rows_product.rows_plain(vectors, weight, tile, eps=EPS, out=self.wide)
        elif self.kind == "gate_up":
            rows_product.rows_gated(vectors, weight, tile, eps=EPS, out=self.narrow)
        elif self.kind == "head":
            rows_product.rows_logits(vectors, weight, tile, eps=EPS, out=self.wide, best=self.best)
        else:
            out = ScaledRows(x=self.narrow, squares=self._scratch(-(-self.outputs // tile.out), self.columns))
            scale = self.scale[: self.outputs]
            rows_product.rows_add(self.x, weight, tile, residual=self.residual, scale=scale, out=out)

    def _launch_block(self, weight: torch.Tensor, tile: BlockTile) -> None:
        from worker.kernels import block_product
        from worker.kernels.rms_norm import rms_norm_parts

        if self.kind == "gate_up":
            block_product.block_gated(self.x, weight, tile, out=self.narrow)
        elif self.kind == "head":
            block_product.block_logits(self.x, weight, tile, out=self.wide, best=self.best)
        else:
            out = self._scratch(tile.parts * self.rows, self.outputs).view(tile.parts, self.rows, self.outputs)
            block_product.block_parts(self.x, weight, tile, out=out)
            if self.kind != "qkv":
                scale = self.scale[: self.outputs]
                rms_norm_parts(out, scale, EPS, residual=self.residual, out=self.narrow)

    def _scratch(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=CUDA)

    def _partials(self, config: DecoderConfig) -> Any:
        from worker.kernels.early_plan import early_plan
        from worker.kernels.partials import empty_partials

        plan = early_plan(
            rows=self.rows,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            width=2 * CONTEXT,
            num_sms=num_sms(CUDA),
        )
        positions = torch.full((self.rows,), CONTEXT, device=CUDA)
        heads = {"num_heads": config.num_heads, "head_dim": config.head_dim}
        partials = empty_partials(positions, plan, **heads, dtype=torch.bfloat16)
        partials.sums.zero_()
        partials.stats.zero_()
        return partials

    def us(self, tile: Tile) -> float:
        """Microseconds of one launch, with the sum and norm of its parts, in a graph of one launch a matrix."""
        self.launch(self.weights[0], tile)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                self.launch(weight, tile)
        return 1e3 * device_ms(graph.replay, rounds=4, blocks=3) / len(self.weights)


def compile_jobs(jobs: list[Job]) -> None:
    """In a process of its own: leaves the kernels in Triton's cache."""
    for name, way, rows, kind, tile in jobs:
        size, outputs = shapes_of(name)[kind]
        weight = torch.zeros((2 if kind == "gate_up" else 1) * outputs, size, dtype=torch.bfloat16, device=CUDA)
        try:
            MatrixBench(name, way, rows, kind, [weight]).launch(weight, tile)
        except Exception:  # noqa: BLE001 - measured again, and reported, by the parent
            traceback.print_exc()


def compile_all(jobs: list[Job], processes: int) -> None:
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_jobs, [jobs[i::processes] for i in range(processes)])
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.1f} s", flush=True)


@contextmanager
def tiles_changed(way: Way, chosen: dict[MatrixKind, Tile]) -> Iterator[None]:
    """Steps use `chosen` inside."""
    module_name, _, function = LOOKUPS[way].rpartition(".")
    module: Any = importlib.import_module(module_name)
    original = getattr(module, function)
    setattr(module, function, lambda kind, *shape: chosen.get(kind) or original(kind, *shape))
    try:
        yield
    finally:
        setattr(module, function, original)


def step_us(model: CausalLM, way: Way, rows: int, chosen: dict[MatrixKind, Tile]) -> float:
    with tiles_changed(way, chosen):
        return 1e3 * DecodeBench(model, "triton", rows, CONTEXT, way=way).step_ms(blocks=3)


@contextmanager
def plan_changed(plan: ShortPlan | None) -> Iterator[None]:
    """Inside, steps of one row attend by `plan`; None: programs share its tokens."""
    module: Any = importlib.import_module("worker.model.vector_step")
    original, module.short_plan = module.short_plan, lambda *_, **__: plan
    try:
        yield
    finally:
        module.short_plan = original


class Retune:
    """The tiles of one model, way and number of rows."""

    def __init__(self, name: str, model: CausalLM, way: Way, rows: int) -> None:
        self.name, self.model, self.way, self.rows = name, model, way, rows
        self.label = f"{name} {way} r{rows}"
        self.alone: dict[MatrixKind, list[tuple[float, Tile]]] = {}
        self.failed: list[str] = []

    def measure_alone(self) -> None:
        for kind in KINDS:
            weights = matrix_weights(self.model.module, kind)
            bench = MatrixBench(self.name, self.way, self.rows, kind, weights)
            measured = []
            for tile in candidates(self.name, self.way, self.rows, kind):
                try:
                    measured.append((bench.us(tile), tile))
                except Exception as error:  # noqa: BLE001 - a tile that does not work is no candidate
                    self.failed.append(f"{kind} {tile}: {str(error)[:150]}")
            measured.sort(key=lambda pair: pair[0])
            self.alone[kind] = measured
            megabytes = weights[0].nbytes / 1e6
            shown = [f"{us:.2f} us {megabytes / us:.2f} TB/s {short(tile)}" for us, tile in measured[:4]]
            print(f"{self.label} {kind}:", "; ".join(shown), flush=True)

    def refine(self) -> tuple[dict[MatrixKind, Tile], float]:
        """One pass over the kinds, each with the best few alone, inside the whole step."""
        chosen = {kind: measured[0][1] for kind, measured in self.alone.items()}
        best, shipped = self._step_us(chosen), self._step_us({})
        print(f"{self.label} step: shipped tiles {shipped:.1f} us, best alone {best:.1f} us", flush=True)
        for kind in KINDS:
            for _, tile in self.alone[kind][1:BEST_ALONE]:
                us = self._step_us(chosen | {kind: tile})
                if us < best - 0.5:
                    best, chosen = us, chosen | {kind: tile}
        again = self._step_us(chosen)
        print(f"{self.label} step: refined {best:.1f} us, again {again:.1f} us", flush=True)
        return chosen, again

    def refine_plan(self, chosen: dict[MatrixKind, Tile]) -> tuple[ShortPlan | None, float]:
        """The attention of one row in a short tier, and the tile of the projection after it, inside the whole step."""
        config, best = config_of(self.name), None
        with plan_changed(None):
            best_us = self._step_us(chosen)
        plans = short_plan.candidates(config.head_dim, 2 * CONTEXT)
        if config.num_heads // config.num_kv_heads > short_plan.MAX_GROUP:
            plans = []
        for plan in plans:
            best, best_us = min((best, best_us), (plan, self._plan_us(chosen, plan)), key=lambda pair: pair[1])
        if best is not None:
            size, _ = shapes_of(self.name)["o"]
            for tile in vector_tiles.candidates("down", size, head_dim=config.head_dim):
                plan = replace(best, projection=tile)
                best, best_us = min((best, best_us), (plan, self._plan_us(chosen, plan)), key=lambda pair: pair[1])
        print(f"{self.label} step: {best_us:.1f} us with {best}", flush=True)
        return best, best_us

    def _plan_us(self, chosen: dict[MatrixKind, Tile], plan: ShortPlan) -> float:
        try:
            with plan_changed(plan):
                return self._step_us(chosen)
        except Exception as error:  # noqa: BLE001 - a plan that does not work is no candidate
            self.failed.append(f"{plan}: {str(error)[:150]}")
            return float("inf")

    def _step_us(self, chosen: dict[MatrixKind, Tile]) -> float:
        return step_us(self.model, self.way, self.rows, chosen)

    def entries(self, chosen: dict[MatrixKind, Tile]) -> list[str]:
        """Lines for TILES."""
        shapes = shapes_of(self.name)
        columns = self.rows if self.way == "vector" else block_tiles.columns_for(self.rows)
        return [
            f'    ("{kind}", {shapes[kind][0]}, {shapes[kind][1]}): {{{columns}: {short(tile)}}},'
            for kind, tile in chosen.items()
        ]


def short(tile: Tile) -> str:
    """As in the table."""
    if isinstance(tile, RowTile):
        return f"RowTile({tile.out}, {tile.num_warps}, {tile.chunk}, {tile.ahead}, {tile.pace})"
    if isinstance(tile, BlockTile):
        return f"BlockTile({tile.chunk}, {tile.stages}, {tile.parts})"
    return f"Tile({tile.out}, {tile.num_warps}, {tile.chunk}, {tile.pace})"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--ways", nargs="+", default=list(LOOKUPS), choices=LOOKUPS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--processes", type=int, default=14)
    options = parse_for_gpu(parser)
    cases = [(way, rows) for way in options.ways for rows in options.rows if rows in ROWS_OF[way]]
    compile_all(
        [
            (name, way, rows, kind, tile)
            for name in options.models
            for way, rows in cases
            for kind in KINDS
            for tile in candidates(name, way, rows, kind)
        ],
        options.processes,
    )
    results = Results(bench="decode_tiles", hardware=torch.cuda.get_device_name())
    for name in options.models:
        model = native_model(name)
        for way, rows in cases:
            retune = Retune(name, model, way, rows)
            retune.measure_alone()
            # Tiles hold for all tiers: the projection's is measured where it has something to merge.
            with plan_changed(None):
                chosen, us = retune.refine()
            plan = None
            if (way, rows) == ("vector", 1):
                plan, us = retune.refine_plan(chosen)
            results.add(
                system=f"graphpool_{way}", model=name, batch=rows, context=CONTEXT, metric="decode_step_ms", unit="ms",
                value=us / 1e3, scope="step",
            )  # fmt: skip
            print("\n".join(retune.entries(chosen)), flush=True)
            results.extra[retune.label] = {
                "entries": retune.entries(chosen),
                "plan": str(plan),
                "alone": {kind: [(us, short(tile)) for us, tile in found] for kind, found in retune.alone.items()},
                "failed": retune.failed,
            }
            print("\n".join(retune.failed[:5]), flush=True)
            results.write()
            free_memory()
        del model
        free_memory()


if __name__ == "__main__":
    main()
