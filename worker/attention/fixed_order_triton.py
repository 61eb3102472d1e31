"""Where the rows of a step write their keys and find those of others, for the fixed-order kernels."""

from __future__ import annotations

import torch

from worker.kernels.fixed_order_attention import QueryTables, SplitWorkspace, attention
from worker.kernels.fixed_order_matmul import SplitSums
from worker.kernels.fixed_order_rope import turn_and_store
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.row_slots import row_slots
from worker.kv_cache import KVCache


class TritonFixedOrderAttention:
    """Runs of neighbouring rows, each with tables of its own. Takes projections as the fixed-order product leaves them."""

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        runs: list[tuple[slice, QueryTables]],
        slots: torch.Tensor | None = None,
        workspace: SplitWorkspace | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.runs = runs
        self.workspace = workspace
        self.slots = row_slots(runs[0][1]) if slots is None else slots
        """[rows] int64; None: the first run has all rows, and its tables tell."""

    def attend_sums(
        self, layer: int, sums: SplitSums, bias: torch.Tensor | None, positions: torch.Tensor, layout: QkvLayout
    ) -> torch.Tensor:
        """The fused projection of all rows -> attended [rows, num_heads * head_dim]; keys and values are kept."""
        keys, values = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        q = turn_and_store(sums, bias, layout, positions, self.slots, keys, values)
        parts = [
            attention(q[span], keys, values, tables, self.workspace, head_dim=layout.head_dim)
            for span, tables in self.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __call__(self, layer: int, *_: torch.Tensor, **__: object) -> torch.Tensor:
        """Never called: see worker.causal_lm.StepAttention for what it would be."""
        raise TypeError(f"layer {layer}: this attention takes the projections of a fixed-order product, by attend_sums")
