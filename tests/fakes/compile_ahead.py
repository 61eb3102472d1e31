"""Builds the kernels of a small worker ahead, for Hopper and without a GPU; then launches what its keys launch, and prints what that builds.

Run in a process of its own: `python -m tests.fakes.compile_ahead`, with `deterministic`, with `processes`, or with both behind it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.shapes import TINY_SHAPE
from tests.fakes.offline_gpu import compiling_for_hopper
from worker.kernels.build_processes import BuildProcesses

PROCESSES = BuildProcesses(2) if "processes" in sys.argv else None
SHAPE = TINY_SHAPE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}


def runner_of(folder: Path, *, is_deterministic: bool) -> Any:
    """A graph runner as a GPU would get it, on CPU tensors."""
    from worker import build
    from worker.config import WorkerConfig
    from worker.load_causal_lm import load_causal_lm
    from worker.model.source import resolve_model

    (folder / "config.json").write_text(json.dumps(SHAPE))
    config = WorkerConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        dtype="bfloat16",
        graphs="fake",
        max_batch=4,
        prefill_chunk=32,
        kv_cache_bytes=1 << 20,
    )
    files = resolve_model(config.model, load_format="dummy")
    served = load_causal_lm(config, files, device=torch.device("cpu"), dtype=torch.bfloat16)
    if is_deterministic:
        served = fixed_order(served)
    build.create_kernels = partial(kernels_of, is_deterministic)
    runner: Any = build.create_engine(config, files, served, None).runner
    runner.eager.sampling._may_fuse = True
    return runner


def fixed_order(served: Any) -> Any:
    """What a GPU finds out about its products is taken for granted."""
    from dataclasses import replace

    from worker.deterministic import triton_model
    from worker.deterministic.row_tiles import RowTiles
    from worker.kernels.build_ahead import build_ahead

    decoder = served.model.decoder
    built = build_ahead(triton_model.products_to_go_through(decoder), PROCESSES)
    print(json.dumps({"products": built}))
    vars(triton_model)["equal_tiles"] = lambda sizes, *_: RowTiles(tuple(sizes))
    return replace(served, model=triton_model.TritonFixedOrderCausalLM(decoder))


def kernels_of(is_deterministic: bool, _config: Any, served: Any, shapes: Any, kv_cache: Any) -> Any:
    """Those of a GPU, all of them."""
    num_heads, rows = served.model.shape.num_heads, shapes.buckets.largest
    if is_deterministic:
        from worker.deterministic.triton_kernels import TritonFixedOrderKernels

        return TritonFixedOrderKernels(kv_cache, num_heads=num_heads, max_rows=rows, max_tokens=shapes.tiers.longest)
    from worker.triton_kernels import TritonKernels

    return TritonKernels(kv_cache, num_heads=num_heads, max_rows=rows, gemv_rows=1, product_rows=2, block_rows=4)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, compiling_for_hopper():
        import triton

        from worker.kernel_builds import KernelBuilds
        from worker.kernels import device

        device.multiplies_in_groups = lambda _: True  # type: ignore[assignment]
        runner = runner_of(Path(folder), is_deterministic="deterministic" in sys.argv)
        built: list[str] = []
        here: list[str] = []

        def on_built(*, src: Any, cache_hit: bool, **_: Any) -> None:
            built.append(src.name)
            here.extend([] if cache_hit else [src.name])

        triton.knobs.compilation.listener = on_built
        runner.kv_cache.storage.fill_(7.0)
        before = runner.eager.decode_inputs.staging.device["token_ids"].clone()
        builds = KernelBuilds(runner.regions, runner.session.waiting, PROCESSES)
        asked = builds.build_first()
        while (more := builds.build_next()) is not None:
            asked += more
        for key in runner.session.waiting:
            while not builds.are_built(key):
                continue
        ahead = len(built)
        is_untouched = bool((runner.kv_cache.storage == 7.0).all()) and torch.equal(
            before, runner.eager.decode_inputs.staging.device["token_ids"]
        )
        runner.regions.model.module.embedding.fill_(0.0)
        for key in runner.session.waiting:
            runner.regions.go_through(key)
        found = {
            "asked": asked,
            "ahead": ahead,
            "later": built[ahead:],
            "here": here,
            "is_untouched": is_untouched,
            "has_symbols": "sympy" in sys.modules,
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
