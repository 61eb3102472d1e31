"""Random numbers as a function of (seed, choice, position): Philox 4x32-10 (Salmon et al., SC 2011).

The same request draws the same numbers in any batch, row, worker or resumed run, and on any device bit for bit.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
UNIFORM_BITS = 24
"""Of one number."""


def device_fractions(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] int64 each -> [rows] int64: numbers in [0, 1) times 2**UNIFORM_BITS, in torch, so that a captured graph can draw.

    The counter is (position, choice, 0, 0), the key is the seed.
    """
    words = [positions & MASK, choices & MASK, torch.zeros_like(positions), torch.zeros_like(positions)]
    keys = [seeds & MASK, (seeds >> 32) & MASK]
    for _ in range(ROUNDS):
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            ((second >> 32) & MASK) ^ words[1] ^ keys[0],
            second & MASK,
            ((first >> 32) & MASK) ^ words[3] ^ keys[1],
            first & MASK,
        ]
        keys = [(key + weyl) & MASK for key, weyl in zip(keys, WEYL, strict=True)]
    return words[0] >> (32 - UNIFORM_BITS)
