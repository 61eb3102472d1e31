"""The numbers of worker.rng once more, in NumPy's unsigned arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.rng import MASK, MULTIPLIERS, ROUNDS, WEYL


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
