"""What the launches of the sampling stage leave to each other. Known without triton, since it is planned for."""

from __future__ import annotations

from math import prod

import torch

BLOCK = 4096
"""Logits of one program."""
BINS = 128
"""Of the coarse histogram. Logits in its last bin have no mass."""
FINE_BINS = 64
"""Of the one that looks into a few bins of the coarse one."""
TOP_LANES = 32
"""Room for a block's likeliest tokens."""
CAPACITY = 2048
"""Logits between two bins that fit into the list; a row with more is searched whole, which takes longer."""


def scratch_spec(rows: int, num_blocks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types by name."""
    whole, small = torch.int64, torch.int32
    return {
        "best": ((rows, num_blocks), whole),
        "masses": ((rows, num_blocks), whole),
        "own_mass": ((rows, num_blocks), whole),
        "top": ((rows, num_blocks, TOP_LANES), whole),
        "coarse": ((rows, BINS), small),
        "fine": ((rows, FINE_BINS), small),
        "bracket": ((rows, 4), small),
        "span": ((rows, 2), torch.float32),
        "above": ((rows, 2), whole),
        "listed": ((rows, 2), small),
        "values": ((rows, CAPACITY), torch.float32),
        "owners": ((rows, CAPACITY), small),
        "kept": ((rows, num_blocks), whole),
        "cuts": ((rows,), small),
    }


def scratch_bytes(rows: int, vocab_size: int) -> list[int]:
    """Of each tensor."""
    spec = scratch_spec(rows, -(-vocab_size // BLOCK))
    return [prod(shape) * dtype.itemsize for shape, dtype in spec.values()]
