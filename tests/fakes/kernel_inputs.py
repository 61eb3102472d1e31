"""Random inputs of kernels: a pool with rows of given lengths in shuffled blocks, projections, layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.qkv_layout import QkvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention shape of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_norms: bool = False

    @property
    def total(self) -> int:
        """Heads of the fused projection."""
        return self.num_heads + 2 * self.num_kv_heads


class Pool:
    """One layer's keys and values; every slot that is no row's past, and all of block 0, is NaN."""

    def __init__(
        self,
        heads: Heads,
        lengths: Sequence[int],
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        rows, num_blocks = len(lengths), len(lengths) * width + 1
        shape = (num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
        self.positions = torch.tensor(lengths, device=device) - 1
        order = torch.randperm(num_blocks - 1, generator=generator, device=device).to(torch.int32) + 1
        self.block_tables = order.reshape(rows, width)
        self.slots = self._slots(self.positions, block_size)
        past = torch.zeros(num_blocks * block_size, dtype=torch.bool, device=device)
        for row, length in enumerate(lengths):
            places = torch.arange(length - 1, device=device)
            table = self.block_tables[row].long()
            past[table[places // block_size] * block_size + places % block_size] = True
        dead = ~past.view(num_blocks, block_size, 1, 1)
        self.keys, self.values = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype).masked_fill_(dead, torch.nan)
            for _ in range(2)
        )

    def _slots(self, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        blocks = self.block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
        return blocks.long() * block_size + positions % block_size


def layout(heads: Heads, *, dtype: torch.dtype, device: torch.device, num_positions: int, seed: int = 1) -> QkvLayout:
    """Real angles; norm weights around one where the model has norms."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.arange(0, heads.head_dim, 2) / heads.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), 10_000.0**-pairs)
    norms = [1 + 0.1 * torch.randn(heads.head_dim, generator=generator) for _ in range(2)]
    return QkvLayout(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rope_table=torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        q_norm=norms[0].to(device, dtype) if heads.has_norms else None,
        k_norm=norms[1].to(device, dtype) if heads.has_norms else None,
        eps=1e-6,
    )


def projections(heads: Heads, rows: int, *, dtype: torch.dtype, device: torch.device, seed: int = 2) -> torch.Tensor:
    """[rows, heads * head_dim], as a model's fused projection gives it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads.total * heads.head_dim, generator=generator).to(device, dtype)


def workspace(heads: Heads, rows: int, device: torch.device) -> DecodeWorkspace:
    """For up to `rows` rows; what a merge must not use is NaN."""
    made = DecodeWorkspace(
        max_rows=rows,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        device=device,
    )
    made.sums.fill_(torch.nan)
    made.stats.fill_(torch.nan)
    return made
