"""Compiles the tensor-core kernels of public shapes for Hopper, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python -m tests.fakes.compile_products [model ...]`.
"""

from __future__ import annotations

import json
import sys

import torch

from bench.shapes import SHAPES
from tests.fakes.offline_gpu import compiling_for_hopper, machine_code, resources

DTYPES = {"qwen2.5-1.5b": torch.float16}
CASES = (("rows", 5, 16), ("rows", 8, 256), ("blocks", 32, 16), ("blocks", 128, 256))
"""The way, rows, and blocks of a row's table."""


def compile_step(name: str, way: str, rows: int, width: int) -> None:
    """Launch every kernel of one decode step of a one-layer model."""
    from worker.decode_inputs import DecodeInputs
    from worker.kernels.decode_workspace import DecodeWorkspace
    from worker.kv_cache import KVCache
    from worker.model.architecture import DecoderConfig
    from worker.model.block_step import BlockStep, block_tiles
    from worker.model.decoder import Decoder
    from worker.model.rows_step import RowsStep, row_tiles

    config = DecoderConfig.from_dict(SHAPES[name] | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    dtype, device = DTYPES.get(name, torch.bfloat16), torch.device("cpu")
    decoder = Decoder(config, dtype=dtype, device=device)
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 16}
    cache = KVCache(**sizes, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype, device=device)
    inputs = DecodeInputs(max_batch=rows, max_blocks=256, block_size=16, device=device).views(rows, width)
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    workspace = DecodeWorkspace(max_rows=rows, **heads, device=device)
    if way == "rows":
        tiles = row_tiles(config, dtype, rows)
        assert tiles is not None
        RowsStep(decoder, cache, tiles, workspace)(inputs)
    else:
        blocks = block_tiles(config, dtype, rows)
        assert blocks is not None
        BlockStep(decoder, cache, blocks, workspace)(inputs)


def main() -> None:
    with compiling_for_hopper() as compiled:
        found = []
        for name in sys.argv[1:] or SHAPES:
            for way, rows, width in CASES:
                compile_step(name, way, rows, width)
                found += [
                    {"model": name, "way": way, "width": width} | resources(kernel) | machine_code(kernel)
                    for kernel in compiled
                ]
                compiled.clear()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
