"""The paged KV pool: one allocation for the life of the worker."""

from __future__ import annotations

from math import prod

import numpy as np
import torch


class KVCache:
    """Keys and values of every layer, in blocks. A slot is one token's place: block * block_size + offset."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: slots that were never written are read (and masked) by the gather in attention.
        self.storage = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = list(self.storage[0].unbind(0))
        """A layer's keys: [num_blocks, block_size, num_kv_heads, head_dim]."""
        self.values = list(self.storage[1].unbind(0))
        self._key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1) for values in self.values]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [tokens, num_kv_heads, head_dim] at `slots` [tokens] int64."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN or infinity, before another sequence gets them."""
        self.storage[:, :, blocks] = 0


def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages take no memory until they are written, which `torch.zeros` does at once."""
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
