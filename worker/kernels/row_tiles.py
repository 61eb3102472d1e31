"""How the tensor-core kernels of a decode step cut their matrices. Pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from worker.kernels.device import power_of_two
from worker.kernels.matrix_kind import MatrixKind

MIN_COLUMNS = 8
"""The rows of a step are padded to so many at least: the right side of a tensor-core tile."""
MAX_ROWS = 16
_LEAST_SHARE = 64
"""Inputs of one warp in one chunk: fewer do not fill a tensor-core tile with eight numbers side by side."""
_MAX_NUMBERS_A_THREAD = 320
"""Of weights and vectors that one thread holds at once."""
_LEAST_WEIGHTS_A_THREAD = 64
"""Fewer would not keep enough loads on their way."""
_USUAL_WEIGHTS = 192
"""Of one thread in tiles of unknown matrices."""
_MIN_OUT = 16
_FEW_WARPS = 4


@dataclass(frozen=True, slots=True)
class RowTile:
    """What one program does."""

    out: int
    """Rows of the matrix: 16 or 32. Of "gate_up", half of them gates and half ups."""
    num_warps: int
    chunk: int
    """Inputs that are multiplied at a time, a power of two; each warp takes its share of them."""
    ahead: int
    """Chunks of weights that are requested before the wait, and kept requested after it."""
    pace: int = 0
    """0: they are requested at once. 1: each, when a word of the one before it arrives."""

    def numbers_a_thread(self, columns: int) -> int:
        """Weights and vectors that one thread holds."""
        return (self.out * self.ahead + columns) * self.chunk // (32 * self.num_warps)


TILES: dict[tuple[MatrixKind, int, int], dict[int, RowTile]] = {
    ("gate_up", 2048, 8192): {8: RowTile(32, 4, 256, 2, 1)},
    ("down", 8192, 2048): {8: RowTile(16, 8, 512, 8, 1)},
    ("qkv", 2048, 3072): {8: RowTile(16, 4, 1024, 2, 1)},
    ("o", 2048, 2048): {8: RowTile(16, 4, 256, 8, 1)},
    ("head", 2048, 128256): {8: RowTile(32, 4, 256, 2, 1)},
    ("gate_up", 576, 1536): {8: RowTile(16, 4, 512, 2, 1)},
    ("down", 1536, 576): {8: RowTile(16, 4, 1024, 2, 1)},
    ("qkv", 576, 960): {8: RowTile(16, 4, 512, 2, 1)},
    ("o", 576, 576): {8: RowTile(16, 4, 1024, 1, 0)},
    ("head", 576, 49152): {8: RowTile(32, 4, 512, 2, 1)},
    ("gate_up", 1536, 8960): {8: RowTile(16, 4, 256, 4, 1)},
    ("down", 8960, 1536): {8: RowTile(16, 8, 1024, 4, 1)},
    ("qkv", 1536, 2048): {8: RowTile(16, 4, 1024, 2, 1)},
    ("o", 1536, 1536): {8: RowTile(16, 4, 1024, 2, 1)},
    ("head", 1536, 151936): {8: RowTile(32, 4, 1024, 1, 0)},
    ("gate_up", 4096, 11008): {8: RowTile(16, 4, 256, 8, 1)},
    ("down", 11008, 4096): {8: RowTile(16, 4, 256, 8, 1)},
    ("qkv", 4096, 12288): {8: RowTile(16, 4, 256, 4, 1)},
    ("o", 4096, 4096): {8: RowTile(16, 4, 256, 8, 1)},
    ("head", 4096, 32000): {8: RowTile(32, 4, 256, 2, 1)},
    ("gate_up", 4096, 12288): {8: RowTile(16, 4, 512, 4, 1)},
    ("down", 12288, 4096): {8: RowTile(16, 4, 256, 8, 1)},
    ("qkv", 4096, 6144): {8: RowTile(16, 4, 256, 4, 1)},
    ("head", 4096, 151936): {8: RowTile(32, 4, 256, 2, 1)},
}
"""Measured on an H200: (kind, inputs, outputs) -> the smallest number of columns from which a tile holds."""


def columns_for(rows: int) -> int:
    """Rows with their padding."""
    return max(power_of_two(rows), MIN_COLUMNS)


def row_tile_for(kind: MatrixKind, size: int, out: int, rows: int) -> RowTile:
    """The tile of a matrix [out, size] for `rows` vectors."""
    columns = columns_for(rows)
    measured = TILES.get((kind, size, out), {})
    known = [least for least in measured if least <= columns]
    return measured[max(known)] if known else default_tile(kind, size, columns)


def default_tile(kind: MatrixKind, size: int, columns: int) -> RowTile:
    """For shapes that nobody has measured."""
    chunk = min(max(power_of_two(size) // 2, _LEAST_SHARE * _FEW_WARPS), 256 if columns > MIN_COLUMNS else 512)
    out = 2 * _MIN_OUT if kind == "head" else _MIN_OUT
    ahead = max(min(-(-size // chunk), _USUAL_WEIGHTS * 32 * _FEW_WARPS // (out * chunk)), 1)
    return RowTile(out, _FEW_WARPS, chunk, ahead, 1 if ahead > 1 else 0)


def candidates(kind: MatrixKind, size: int, columns: int) -> list[RowTile]:
    """Tiles worth measuring for a matrix with `size` inputs."""
    found: dict[RowTile, None] = {}
    outs = (16, 32) if kind in ("gate_up", "head") else (16,)
    for out, num_warps, chunk, ahead in product(outs, (4, 8), (256, 512, 1024), (1, 2, 4, 8)):
        tile = RowTile(out, num_warps, chunk, ahead, 1 if ahead > 1 else 0)
        # A chunk twice the inputs is another's double.
        fits_size = chunk < 2 * size and ahead <= -(-size // chunk)
        fits_warps = chunk >= _LEAST_SHARE * num_warps and not (out > _MIN_OUT and num_warps > _FEW_WARPS)
        fits_registers = tile.numbers_a_thread(columns) <= _MAX_NUMBERS_A_THREAD
        weights = out * ahead * chunk // (32 * num_warps)
        if fits_size and fits_warps and fits_registers and weights >= min(_LEAST_WEIGHTS_A_THREAD, size // 16):
            found[tile] = None
    return list(found)
