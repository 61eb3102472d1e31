"""What the decoder needs of attention, and all it knows about it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from worker.kernels.qkv_layout import QkvLayout


class Attend(Protocol):
    """Attention of one step over whatever holds the keys and values of the tokens before."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep `k` and `v`, and attend causally within each sequence, with softmax scale 1 / sqrt(D).

        q [T, Hq, D], k and v [T, Hkv, D], already turned to their positions -> [T, Hq, D]. Query head `h` reads key
        head `h // (Hq / Hkv)`. Each token's heads are contiguous; between tokens there may be gaps.
        """


@runtime_checkable
class FusedAttend(Protocol):
    """Attention that takes projections as they come; then the other small operations run as fused kernels as well."""

    def attend_qkv(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        """Norm and turn queries and keys as `layout` says, keep keys and values, and attend.

        qkv [T, (Hq + 2 Hkv) * D], contiguous, not needed afterwards; positions [T] int64 -> [T, Hq * D].
        """
