"""Looks, on this machine, whether a way of computing rows gives a row the same bits wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.deterministic.row_tiles import RowTiles
from worker.errors import ModelLoadError

TileProduct = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, ...]; `rows` is a size of tile."""


def equal_tiles(sizes: Sequence[int], tile_product: TileProduct, rows: torch.Tensor, what: str) -> RowTiles:
    """Those of `sizes` that give the same bits as the first, at every place of a tile and beside any neighbours.

    `rows` [at least the largest size, in] are random. Raises ModelLoadError when not even the first agrees with itself.
    """
    base = _computed(rows[: 2 * sizes[0]], sizes[0], tile_product)
    found = [size for size in sizes if _agrees(rows, size, base, tile_product)]
    if sizes[0] not in found:
        raise ModelLoadError(f"deterministic is on, but on this device {what} rounds a row by its place in the batch")
    return RowTiles(tuple(found))


def _agrees(rows: torch.Tensor, size: int, base: torch.Tensor, tile_product: TileProduct) -> bool:
    """The rows of `base` first in a tile, then last in it, then turned by one."""
    checked = len(base)
    if size < checked:
        shifted = rows[:checked].roll(1, 0)
        return torch.equal(_computed(rows[:checked], size, tile_product), base) and torch.equal(
            _computed(shifted, size, tile_product).roll(-1, 0), base
        )
    tile = rows[:size]
    first, last = tile_product(tile), tile_product(tile.roll(-checked, 0))
    odd = tile_product(tile.roll(1, 0))
    places = torch.arange(checked, device=rows.device)
    return (
        torch.equal(first[:checked], base)
        and torch.equal(last[size - checked :], base)
        and torch.equal(odd[(places + 1) % size], base)
    )


def _computed(rows: torch.Tensor, size: int, tile_product: TileProduct) -> torch.Tensor:
    return torch.cat([tile_product(tile) for tile in rows.split(size)])
