"""Attention in its plainest form: every key and value of one sequence, kept in order."""

from __future__ import annotations

import torch
from torch.nn import functional


class DenseAttend:
    """One sequence that grows by the tokens of each call."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = self.keys[layer] = _joined(self.keys[layer], k)
        values = self.values[layer] = _joined(self.values[layer], v)
        new, total = q.shape[0], keys.shape[0]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        repeats = q.shape[1] // k.shape[1]
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(repeats, 0),
            values.transpose(0, 1).repeat_interleave(repeats, 0),
            attn_mask=mask,
        )
        return out.transpose(0, 1)


def _joined(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.clone() if old is None else torch.cat((old, new))
