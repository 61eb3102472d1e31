"""Where the keys of a step's rows belong in the pool, by the tables that tell where they are found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options
from worker.kernels.fixed_order_attention import QueryTables


@triton.jit(do_not_specialize=["table_row", "block_size"], do_not_specialize_on_alignment=["positions", "block_tables"])
def _row_slots(
    positions: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    table_row: tl.tensor,
    block_size: tl.tensor,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    block = tl.load(block_tables + row * table_row + position // block_size).to(tl.int64)
    tl.store(slots + row, block * block_size + position % block_size)


def row_slots(tables: QueryTables) -> torch.Tensor:
    """[rows] int64: where the key of each row belongs."""
    slots = torch.empty_like(tables.positions)
    _row_slots[(len(slots),)](
        tables.positions,
        tables.block_tables,
        slots,
        tables.block_tables.stride(0),
        tables.block_size,
        num_warps=1,
        **launch_options(slots.device),
    )
    return slots
