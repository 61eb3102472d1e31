"""Random numbers as a function of (seed, choice, position): Philox 4x32-10 (Salmon et al., SC 2011).

The same request draws the same numbers in any batch, row, worker or resumed run, and on any device bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


UNIFORM_BITS = 24


def uniforms(
    seeds: npt.NDArray[np.int64], choices: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) on a 2**-24 grid, one a row. The counter is (position, choice, 0, 0), the key is the seed."""
    mask, shift = np.uint64(MASK), np.uint64(32)
    words = [positions.astype(np.uint64) & mask, choices.astype(np.uint64) & mask]
    words += [np.zeros_like(words[0]), np.zeros_like(words[0])]
    keys = [seeds.astype(np.uint64) & mask, seeds.astype(np.uint64) >> shift]
    for _ in range(ROUNDS):
        first, second = words[0] * np.uint64(MULTIPLIERS[0]), words[2] * np.uint64(MULTIPLIERS[1])
        words = [
            (second >> shift) ^ words[1] ^ keys[0],
            second & mask,
            (first >> shift) ^ words[3] ^ keys[1],
            first & mask,
        ]
        keys = [(key + np.uint64(weyl)) & mask for key, weyl in zip(keys, WEYL, strict=True)]
    return (words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def device_uniforms(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`uniforms` in torch int64 arithmetic, so that a captured graph can draw: [rows] int64 each -> [rows] float32."""
    return device_fractions(seeds, choices, positions).to(torch.float32) * 2.0**-UNIFORM_BITS


def device_fractions(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same numbers times 2**24: [rows] int64."""
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
