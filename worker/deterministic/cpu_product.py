"""Matrix products on the CPU whose rows do not know of each other.

MKL sums a row in one order for all products of this form, as long as their rows are a multiple of four: that is checked
for every shape of a model when it is loaded (`worker.deterministic.verify`), and what differs is not used.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from worker.deterministic.row_tiles import RowTiles

PRODUCT_ROWS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of one product, at most these."""
_MIN_COLUMNS, _MAX_COLUMNS = 32, 128
_BEST_COLUMNS = 96
"""Outputs of one small product: their weights and results stay in the first cache."""


def tile_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]: many small products, each with all rows and some of the outputs."""
    columns = _columns(weight.shape[0])
    if columns is None:
        return functional.linear(x, weight)
    blocks = weight.view(-1, columns, weight.shape[1]).transpose(1, 2)
    return torch.bmm(x.expand(len(blocks), *x.shape), blocks).transpose(0, 1).reshape(len(x), -1)


def product(x: torch.Tensor, weight: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """The same for any number of rows."""
    rows, cut = len(x), tiles.cut(len(x))
    if sum(cut) > rows:
        x = functional.pad(x, (0, 0, 0, sum(cut) - rows))
    if len(cut) == 1:
        return tile_product(x, weight)[:rows]
    return torch.cat([tile_product(part, weight) for part in x.split(cut)])[:rows]


@cache
def _columns(outputs: int) -> int | None:
    """The divisor of `outputs` nearest to the best; None where there is none in reach."""
    divisors = [size for size in range(_MIN_COLUMNS, _MAX_COLUMNS + 1) if outputs % size == 0]
    return min(divisors, key=lambda size: (size % 16, abs(size - _BEST_COLUMNS)), default=None)
