"""What the programs of an attention leave for the kernel after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.kernels.early_plan import EarlyPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partials:
    """Results over parts of the keys, each with its weight: those of a row's first splits, as many as its length needs."""

    sums: torch.Tensor
    """[rows, num_splits, num_heads, head_dim] in the model's type: normalised over its own part."""
    stats: torch.Tensor
    """[rows, num_splits, num_heads] float32: logarithm to base 2 of the part's sum of weights."""
    positions: torch.Tensor
    """[rows] int64: how many tokens each row has before its new one."""
    plan: EarlyPlan

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.sums.shape[2])

    @property
    def head_dim(self) -> int:
        """Of each."""
        return int(self.sums.shape[3])


def empty_partials(
    positions: torch.Tensor, plan: EarlyPlan, *, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Partials:
    """Room for the rows of `positions`."""
    shape = (len(positions), plan.num_splits, num_heads)
    return Partials(
        sums=torch.empty(*shape, head_dim, dtype=dtype, device=positions.device),
        stats=torch.empty(shape, dtype=torch.float32, device=positions.device),
        positions=positions,
        plan=plan,
    )
