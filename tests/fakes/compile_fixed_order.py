"""Compiles the fixed-order kernels for Hopper at the shapes of the public models, without a GPU; prints JSON.

Run in a process of its own: `python -m tests.fakes.compile_fixed_order`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from tests.fakes.compile_kernels import SHAPES
from tests.fakes.kernel_inputs import Heads, layout
from tests.fakes.offline_gpu import compiling_for_hopper, empty, resources

CPU = torch.device("cpu")


def compile_products(hidden: int, intermediate: int, heads: Heads, dtype: torch.dtype) -> None:
    """Every product of one layer in every tile of rows."""
    from worker.kernels.fixed_order_matmul import ROW_TILES, matmul, matmul_gated

    attended = heads.num_heads * heads.head_dim
    matrices = [(heads.total * heads.head_dim, hidden), (hidden, attended), (hidden, intermediate), (32000, hidden)]
    for row_tile in ROW_TILES:
        for outputs, size in matrices:
            matmul(empty(2, size, dtype=dtype), empty(outputs, size, dtype=dtype), row_tile=row_tile)
        gates = empty(2 * intermediate, hidden, dtype=dtype)
        matmul_gated(empty(2, hidden, dtype=dtype), gates, None, row_tile=row_tile)


def compile_rows(hidden: int, heads: Heads, dtype: torch.dtype) -> None:
    """What lies between the products."""
    from worker.kernels.fixed_order_attention import QueryTables, SplitWorkspace, attention
    from worker.kernels.fixed_order_matmul import SplitSums
    from worker.kernels.fixed_order_rope import turn_and_store
    from worker.kernels.fixed_order_rows import add_norm, embed_norm
    from worker.kernels.row_slots import row_slots

    whole, weight = torch.zeros(2, dtype=torch.int64), empty(hidden, dtype=dtype)
    residual, _ = embed_norm(whole, empty(8, hidden, dtype=dtype), weight, 1e-5)
    add_norm(SplitSums(empty(2, 2, hidden, dtype=torch.float32)), None, residual, weight, 1e-5)
    pool = empty(4, 16, heads.num_kv_heads, heads.head_dim, dtype=dtype)
    description = layout(heads, dtype=dtype, device=CPU, num_positions=16)
    parts = SplitSums(empty(2, 2, heads.total * heads.head_dim, dtype=torch.float32))
    q = turn_and_store(parts, None, description, whole, whole, pool, pool)
    group = heads.num_heads // heads.num_kv_heads
    workspace = SplitWorkspace(max_partials=64, max_tokens=1024, group=group, head_dim=heads.head_dim, device=CPU)
    tables = QueryTables(positions=whole, block_tables=torch.zeros(2, 64, dtype=torch.int32), block_size=16)
    row_slots(tables)
    for chosen in (workspace, None):
        attention(q, pool, pool, tables, chosen, head_dim=heads.head_dim)


def facts(kernel: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What matters of one compiled kernel of a model of this type."""
    ptx = kernel.asm["ptx"]
    tiles = sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)))
    return {
        **resources(kernel),
        "dtype": str(dtype).removeprefix("torch."),
        "tiles": tiles,
        "older_tiles": sorted(set(re.findall(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))),
        "fuses": bool(re.search(r"\bfma\.rn(\.ftz)?\.f32", ptx)),
    }


def main() -> None:
    with compiling_for_hopper() as compiled:
        found = []
        for name in sys.argv[1:] or SHAPES:
            hidden, intermediate, heads, dtype = SHAPES[name]
            compile_products(hidden, intermediate, heads, dtype)
            compile_rows(hidden, heads, dtype)
            found += [facts(kernel, dtype) for kernel in compiled]
            compiled.clear()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
