"""How the matrix-vector kernels of a decode step cut their matrices. Pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from worker.kernels.device import power_of_two
from worker.kernels.matrix_kind import MatrixKind

MAX_NUMBERS_A_THREAD = 128
"""Weights that a thread holds at once; they are packed in pairs, and more would leave registers."""
_WARP_NUMBERS = 256
"""What one warp reads at a time: 16 bytes a thread."""
_MAX_WARPS = 16
_LEAST_NUMBERS_A_THREAD = 24
"""Fewer would not keep enough loads on their way."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program does."""

    out: int
    """Outputs it computes."""
    num_warps: int
    chunk: int
    """Inputs that are requested at a time, a power of two."""
    pace: int = 0
    """0: all weights are requested at once. 1: a chunk is, when the one before it arrives. 2: gates and ups as well."""

    @property
    def abreast(self) -> int:
        """Outputs that warps work on side by side, where a chunk is too short for all of them."""
        return min(max(_WARP_NUMBERS * self.num_warps // self.chunk, 1), self.out)

    def numbers_a_thread(self, kind: MatrixKind, size: int) -> int:
        """Weights that one thread holds."""
        matrices = 2 if kind == "gate_up" else 1
        padded = -(-size // self.chunk) * self.chunk
        return max(matrices * self.out * padded // (32 * self.num_warps), 1)


TILES: dict[tuple[MatrixKind, int, int], dict[int, Tile]] = {
    ("gate_up", 2048, 8192): {1: Tile(2, 2, 512, 1), 2: Tile(4, 4, 1024, 1)},
    ("down", 8192, 2048): {1: Tile(4, 16, 4096, 1)},
    ("qkv", 2048, 3072): {1: Tile(4, 2, 512, 1)},
    ("o", 2048, 2048): {1: Tile(8, 4, 1024, 1), 2: Tile(4, 4, 1024, 1)},
    ("head", 2048, 128256): {1: Tile(8, 4, 512, 1), 2: Tile(4, 4, 2048)},
    ("gate_up", 576, 1536): {1: Tile(2, 1, 256, 1)},
    ("down", 1536, 576): {1: Tile(2, 2, 512, 0)},
    ("qkv", 576, 960): {1: Tile(4, 1, 256, 1)},
    ("o", 576, 576): {1: Tile(4, 4, 1024, 0)},
    ("head", 576, 49152): {1: Tile(8, 2, 256, 1)},
    ("gate_up", 1536, 8960): {1: Tile(2, 2, 512, 1)},
    ("down", 8960, 1536): {1: Tile(2, 8, 2048, 1)},
    ("qkv", 1536, 2048): {1: Tile(2, 1, 256, 1)},
    ("o", 1536, 1536): {1: Tile(8, 4, 1024, 0)},
    ("head", 1536, 151936): {1: Tile(8, 4, 512, 1)},
    ("gate_up", 4096, 12288): {1: Tile(2, 4, 1024, 1)},
    ("down", 12288, 4096): {1: Tile(2, 16, 4096, 0)},
    ("qkv", 4096, 6144): {1: Tile(8, 8, 1024, 1)},
    ("o", 4096, 4096): {1: Tile(8, 8, 2048, 1)},
    ("head", 4096, 151936): {1: Tile(8, 8, 4096, 0)},
    ("gate_up", 4096, 11008): {1: Tile(2, 4, 1024, 1)},
    ("down", 11008, 4096): {1: Tile(2, 16, 4096, 0)},
    ("qkv", 4096, 12288): {1: Tile(8, 16, 2048, 1)},
    ("head", 4096, 32000): {1: Tile(4, 8, 2048, 1)},
}
"""Measured on an H200: (kind, inputs, outputs) -> the smallest number of rows from which a tile holds."""


def tile_for(kind: MatrixKind, size: int, out: int, rows: int) -> Tile | None:
    """The tile of a matrix [out, size] for `rows` vectors; None where no tile fits the registers."""
    measured = TILES.get((kind, size, out), {})
    known = [least for least in measured if least <= rows]
    return measured[max(known)] if known else default_tile(kind, size)


def default_tile(kind: MatrixKind, size: int) -> Tile | None:
    """For shapes that nobody has measured."""
    num_warps = min(max(power_of_two(size // 512), 1), _MAX_WARPS)
    chunk = min(_WARP_NUMBERS * num_warps, power_of_two(size))
    for out in (4, 2, 1):
        tile = Tile(out, num_warps, chunk, 1)
        if tile.numbers_a_thread(kind, size) <= MAX_NUMBERS_A_THREAD:
            return tile
    return None


def candidates(kind: MatrixKind, size: int, *, head_dim: int) -> list[Tile]:
    """Tiles worth measuring for a matrix with `size` inputs. The output projection reads whole heads."""
    whole = power_of_two(size)
    found: dict[Tile, None] = {}
    for num_warps, out in product((1, 2, 4, 8, _MAX_WARPS), (2, 4, 8)):
        reach = _WARP_NUMBERS * num_warps
        ways = [(whole if whole == size else reach, 0), (reach, 1), (reach // 2, 2 if kind == "gate_up" else 1)]
        for chunk, pace in ways:
            tile = Tile(out, num_warps, chunk, pace)
            fits = _LEAST_NUMBERS_A_THREAD <= tile.numbers_a_thread(kind, size) <= MAX_NUMBERS_A_THREAD
            is_known = kind != "o" or chunk >= max(reach, head_dim)
            if fits and is_known and chunk <= whole and (chunk < size or not pace):
                found[tile] = None
    return list(found)
