"""How much memory a graph needs, from shapes alone."""

from __future__ import annotations

import torch

from worker.causal_lm import ModelShape
from worker.graphs.key import GraphKey

FLOAT_BYTES = torch.float32.itemsize


def graph_bytes(key: GraphKey, shape: ModelShape, dtype: torch.dtype) -> int:
    """The largest intermediate tensors of the key's region that live at the same time."""
    logits = shape.vocab_size * (FLOAT_BYTES + dtype.itemsize)
    kv_row = shape.num_kv_heads * shape.head_dim * dtype.itemsize
    hidden = shape.hidden_size * dtype.itemsize
    if key.phase == "decode":
        gathered = 2 * key.bucket * key.tier * kv_row
        return key.bucket * (logits + 8 * hidden) + gathered
    return logits + key.bucket * 16 * hidden + 2 * max(key.tier, key.bucket) * kv_row
