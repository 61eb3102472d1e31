"""What the launches of the sampling stage leave to each other. Known without triton, since it is planned for."""

from __future__ import annotations

from math import prod

import torch

BLOCK = 4096
"""Logits of one program."""
BINS = 1024
"""Of the histogram that narrows a cut down. Logits in the last bin have no mass."""
TOP_LANES = 32
"""Room for a block's likeliest tokens."""
CAPACITY = 8192
"""Logits between two bins that fit into the list; a row with more is searched whole, which takes longer."""


def scratch_spec(rows: int, num_blocks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types by name."""
    whole, small = torch.int64, torch.int32
    return {
        "best": ((rows, num_blocks), whole),
        "masses": ((rows, num_blocks), whole),
        "own_mass": ((rows, num_blocks), whole),
        "top": ((rows, num_blocks, TOP_LANES), whole),
        "histogram": ((rows, BINS), small),
        "listed": ((rows,), small),
        "num_above": ((rows,), small),
        "above": ((rows,), whole),
        "values": ((rows, CAPACITY), torch.float32),
        "cuts": ((rows,), small),
    }


def scratch_bytes(rows: int, vocab_size: int) -> list[int]:
    """Of each tensor."""
    spec = scratch_spec(rows, -(-vocab_size // BLOCK))
    return [prod(shape) * dtype.itemsize for shape, dtype in spec.values()]
