"""Which tiles the matrix-vector kernels of a decode step should have on this GPU.

    python -m bench.vector_tiles [--models NAME ...] [--rows N ...] [--processes N]

Measures every candidate alone, over the weights of all layers, then the best few inside whole steps, and prints the
entries of `worker.kernels.vector_tiles.TILES`. Writes `bench/results/vector_tiles.json`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.kernels import CUDA, DecodeBench, native_model
from bench.peers import device_ms
from bench.results_file import Results
from bench.shapes import SHAPES
from worker.causal_lm import CausalLM
from worker.kernels.device import num_sms
from worker.kernels.vector_tiles import MatrixKind, Tile, candidates, tile_for
from worker.model.architecture import DecoderConfig

CONTEXT = 128
BEST_ALONE = 3
KINDS: tuple[MatrixKind, ...] = ("gate_up", "down", "qkv", "o", "head")
Job = tuple[str, int, MatrixKind, Tile]


class MatrixBench:
    """One kind of matrix, with `rows` vectors."""

    def __init__(self, config: DecoderConfig, kind: MatrixKind, rows: int, weights: list[torch.Tensor]) -> None:
        from worker.kernels.early_plan import early_plan
        from worker.kernels.gemv import Norm
        from worker.kernels.partials import empty_partials
        from worker.model.vector_step import matrix_shapes

        self.kind, self.weights = kind, weights
        size, outputs = matrix_shapes(config)[kind]
        dtype = torch.bfloat16
        self.x = torch.randn(rows, size, device=CUDA).to(dtype)
        self.wide = torch.zeros(rows, outputs, device=CUDA)
        self.out = torch.zeros(rows, outputs, dtype=dtype, device=CUDA)
        self.best = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        self.norm = Norm(weight=torch.ones(size, dtype=dtype, device=CUDA), eps=1e-5)
        heads = {"num_heads": config.num_heads, "head_dim": config.head_dim}
        plan = early_plan(
            rows=rows, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, width=256, num_sms=num_sms(CUDA)
        )
        positions = torch.full((rows,), CONTEXT, device=CUDA)
        self.partials = empty_partials(positions, plan, **heads, dtype=dtype)
        self.partials.sums.zero_()
        self.partials.stats.zero_()

    def launch(self, weight: torch.Tensor, tile: Tile) -> None:
        from worker.kernels import gemv

        if self.kind == "qkv":
            gemv.gemv(self.x, weight, tile, norm=self.norm, out=self.wide)
        elif self.kind == "o":
            gemv.gemv_merge_add(self.partials, weight, tile, residual=self.wide, out=self.out)
        elif self.kind == "gate_up":
            gemv.gemv_gated(self.x, weight, tile, norm=self.norm, out=self.out)
        elif self.kind == "down":
            gemv.gemv_add(self.x, weight, tile, residual=self.wide, out=self.out)
        else:
            gemv.gemv_logits(self.x, weight, tile, norm=self.norm, out=self.wide, best=self.best)

    def us(self, tile: Tile) -> float:
        """Microseconds of one launch, in a graph of one launch a matrix."""
        self.launch(self.weights[0], tile)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                self.launch(weight, tile)
        return 1e3 * device_ms(graph.replay, rounds=6, blocks=3) / len(self.weights)


def matrix_weights(decoder: Any, kind: MatrixKind) -> list[torch.Tensor]:
    if kind == "head":
        return [decoder.lm_head] * 3
    return [getattr(layer, f"{kind}_weight") for layer in decoder.layers]


def jobs_of(name: str, rows: int) -> list[Job]:
    from worker.model.vector_step import matrix_shapes

    config = DecoderConfig.from_dict(SHAPES[name])
    found: list[Job] = []
    for kind in KINDS:
        size, outputs = matrix_shapes(config)[kind]
        tiles = dict.fromkeys(candidates(kind, size, head_dim=config.head_dim))
        shipped = tile_for(kind, size, outputs, rows)
        tiles |= {shipped: None} if shipped else {}
        found += [(name, rows, kind, tile) for tile in tiles]
    return found


def compile_jobs(jobs: list[Job]) -> None:
    """In a process of its own: leaves the kernels in Triton's cache."""
    from worker.model.vector_step import matrix_shapes

    for name, rows, kind, tile in jobs:
        config = DecoderConfig.from_dict(SHAPES[name])
        size, outputs = matrix_shapes(config)[kind]
        weight = torch.zeros((2 if kind == "gate_up" else 1) * outputs, size, dtype=torch.bfloat16, device=CUDA)
        try:
            MatrixBench(config, kind, rows, [weight]).launch(weight, tile)
        except Exception:  # noqa: BLE001 - measured again, and reported, by the parent
            traceback.print_exc()


@contextmanager
def tiles_changed(chosen: dict[MatrixKind, Tile]) -> Iterator[None]:
    """Steps use `chosen` inside."""
    from worker.model import vector_step

    module: Any = vector_step
    original = module.tile_for
    module.tile_for = lambda kind, size, out, rows: chosen.get(kind) or original(kind, size, out, rows)
    try:
        yield
    finally:
        module.tile_for = original


def step_us(model: CausalLM, rows: int, chosen: dict[MatrixKind, Tile]) -> float:
    with tiles_changed(chosen):
        return 1e3 * DecodeBench(model, "triton", rows, CONTEXT, way="vector").step_ms(blocks=3)


class Retune:
    """The tiles of one model."""

    def __init__(self, name: str, model: CausalLM, rows: int) -> None:
        self.name, self.model, self.rows = name, model, rows
        self.config = DecoderConfig.from_dict(SHAPES[name])
        self.alone: dict[MatrixKind, list[tuple[float, Tile]]] = {}
        self.failed: list[str] = []

    def measure_alone(self) -> None:
        for kind in KINDS:
            weights = matrix_weights(self.model.module, kind)
            bench = MatrixBench(self.config, kind, self.rows, weights)
            measured = []
            for *_, tile in (job for job in jobs_of(self.name, self.rows) if job[2] == kind):
                try:
                    measured.append((bench.us(tile), tile))
                except Exception as error:  # noqa: BLE001 - a tile that does not work is no candidate
                    self.failed.append(f"{kind} {tile}: {str(error)[:150]}")
            measured.sort(key=lambda pair: pair[0])
            self.alone[kind] = measured
            bandwidth = weights[0].nbytes / 1e6
            shown = [f"{us:.2f} us {bandwidth / us:.2f} TB/s {_short(tile)}" for us, tile in measured[:5]]
            print(f"{self.name} r{self.rows} {kind}:", "; ".join(shown), flush=True)

    def refine(self) -> tuple[dict[MatrixKind, Tile], float]:
        """One pass over the kinds, each with the best few alone, inside the whole step."""
        chosen = {kind: measured[0][1] for kind, measured in self.alone.items()}
        best, shipped = step_us(self.model, self.rows, chosen), step_us(self.model, self.rows, {})
        print(f"{self.name} r{self.rows} step: shipped tiles {shipped:.1f} us, best alone {best:.1f} us", flush=True)
        for kind in KINDS:
            others = [tile for _, tile in self.alone[kind][1:BEST_ALONE]]
            for tile in (*others, self._shipped(kind)):
                changed = chosen | {kind: tile}
                us = step_us(self.model, self.rows, changed)
                if us < best - 0.3:
                    best, chosen = us, changed
        again = step_us(self.model, self.rows, chosen)
        print(f"{self.name} r{self.rows} step: refined {best:.1f} us, again {again:.1f} us", flush=True)
        return chosen, again

    def _shipped(self, kind: MatrixKind) -> Tile:
        from worker.model.vector_step import matrix_shapes

        tile = tile_for(kind, *matrix_shapes(self.config)[kind], self.rows)
        assert tile is not None
        return tile

    def entries(self, chosen: dict[MatrixKind, Tile]) -> list[str]:
        """Lines for TILES."""
        from worker.model.vector_step import matrix_shapes

        shapes = matrix_shapes(self.config)
        return [
            f'    ("{kind}", {shapes[kind][0]}, {shapes[kind][1]}): {{{self.rows}: {_short(tile)}}},'
            for kind, tile in chosen.items()
        ]


def _short(tile: Tile) -> str:
    return f"Tile({tile.out}, {tile.num_warps}, {tile.chunk}, {tile.pace})"


def compile_all(models: list[str], rows: list[int], processes: int) -> None:
    jobs = [job for name in models for count in rows for job in jobs_of(name, count)]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_jobs, [jobs[i::processes] for i in range(processes)])
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    compile_all(options.models, options.rows, options.processes)
    results = Results(bench="vector_tiles", hardware=torch.cuda.get_device_name())
    for name in options.models:
        model = native_model(name)
        for rows in options.rows:
            retune = Retune(name, model, rows)
            retune.measure_alone()
            chosen, us = retune.refine()
            results.add(
                system="graphpool_vector", model=name, batch=rows, context=CONTEXT, metric="decode_step_ms", unit="ms",
                value=us / 1e3, scope="step",
            )  # fmt: skip
            print("\n".join(retune.entries(chosen)), flush=True)
            results.extra[f"{name} r{rows}"] = {
                "entries": retune.entries(chosen),
                "alone": {kind: [(us, _short(tile)) for us, tile in found] for kind, found in retune.alone.items()},
                "failed": retune.failed,
            }
            print("\n".join(retune.failed[:5]), flush=True)
            results.write()
        del model, retune
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
