"""The matrices of a decoder as the kernels of whole steps see them, and how each is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from worker.kernels.device import power_of_two
from worker.kernels.matrix_kind import MatrixKind

if TYPE_CHECKING:
    from worker.model.architecture import DecoderConfig

_VECTOR = 8
"""Numbers of half precision that one load brings, and in the 16 bytes that the copy engine wants rows to begin at."""
_DTYPES = (torch.bfloat16, torch.float16)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTiles(Generic[T]):
    """The tiles of one decoder's matrices."""

    qkv: T
    o: T
    gate_up: T
    down: T
    head: T


def matrix_shapes(config: DecoderConfig) -> dict[MatrixKind, tuple[int, int]]:
    """(inputs, outputs) of each matrix."""
    attended = config.num_heads * config.head_dim
    return {
        "qkv": (config.hidden_size, config.qkv_heads * config.head_dim),
        "o": (attended, config.hidden_size),
        "gate_up": (config.hidden_size, config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
        "head": (config.hidden_size, config.vocab_size),
    }


def matrix_tiles(
    config: DecoderConfig, dtype: torch.dtype, tile_for: Callable[[MatrixKind, int, int], T | None]
) -> MatrixTiles[T] | None:
    """tile_for(kind, inputs, outputs) of every matrix; None where whole steps do not apply, or a matrix has no tile."""
    shapes = matrix_shapes(config)
    is_known = dtype in _DTYPES and config.head_dim == power_of_two(config.head_dim)
    if not is_known or any(size % _VECTOR for size, _ in shapes.values()):
        return None
    tiles = {kind: tile for kind, shape in shapes.items() if (tile := tile_for(kind, *shape)) is not None}
    return MatrixTiles(**tiles) if len(tiles) == len(shapes) else None
