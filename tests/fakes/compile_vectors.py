"""Compiles the matrix-vector kernels of every public shape for Hopper, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python -m tests.fakes.compile_vectors [model ...]`.
"""

from __future__ import annotations

import json
import sys

import torch

from bench.shapes import SHAPES
from tests.fakes.offline_gpu import compiling_for_hopper, machine_code, resources

DTYPES = {"qwen2.5-1.5b": torch.float16}
CASES = ((1, 64), (1, 16), (4, 64))
"""Rows, and blocks of a row's table."""


def compile_step(name: str, rows: int, width: int = 64) -> None:
    """Launch every kernel of one decode step of a one-layer model."""
    from worker.decode_inputs import DecodeInputs
    from worker.kv_cache import KVCache
    from worker.model.architecture import DecoderConfig
    from worker.model.decoder import Decoder
    from worker.model.vector_step import VectorStep, vector_tiles

    config = DecoderConfig.from_dict(SHAPES[name] | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    dtype, device = DTYPES.get(name, torch.bfloat16), torch.device("cpu")
    decoder = Decoder(config, dtype=dtype, device=device)
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 16}
    cache = KVCache(**sizes, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype, device=device)
    inputs = DecodeInputs(max_batch=rows, max_blocks=64, block_size=16, device=device)
    tiles = vector_tiles(config, dtype, rows)
    assert tiles is not None
    VectorStep(decoder, cache, tiles, torch.zeros(rows * config.num_kv_heads, dtype=torch.int32))(
        inputs.views(rows, width)
    )


def main() -> None:
    with compiling_for_hopper() as compiled:
        found = []
        for name in sys.argv[1:] or SHAPES:
            for rows, width in CASES:
                compile_step(name, rows, width)
                found += [
                    {"model": name, "rows": rows, "width": width} | resources(kernel) | machine_code(kernel)
                    for kernel in compiled
                ]
                compiled.clear()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
