"""What the decoder needs of attention, and all it knows about it."""

from __future__ import annotations

from typing import Protocol

import torch


class Attend(Protocol):
    """Attention of one step over whatever holds the keys and values of the tokens before."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep `k` and `v`, and attend causally within each sequence, with softmax scale 1 / sqrt(D).

        q [T, Hq, D], k and v [T, Hkv, D], already turned to their positions -> [T, Hq, D]. Query head `h` reads key
        head `h // (Hq / Hkv)`. Each token's heads are contiguous; between tokens there may be gaps.
        """
