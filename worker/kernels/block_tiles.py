"""How the kernels for some dozens of rows cut their matrices. Pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from worker.kernels.device import power_of_two
from worker.kernels.matrix_kind import MatrixKind

BLOCK_ROWS = 64
"""Outputs of one program."""
MAX_ROWS = 128
_MIN_COLUMNS = 8
_RING_BYTES = 108 * 1024
"""Of shared memory, so that the next kernel's programs find room beside those that are running."""
_MAX_RING_BYTES = 216 * 1024
_MAX_STAGES = 12
_FULL = 100
"""Programs that keep the memory of a GPU busy; more share the inner dimension."""
_SUMMED: tuple[MatrixKind, ...] = ("o", "down")
"""Matrices whose readers add up parts."""


@dataclass(frozen=True, slots=True)
class BlockTile:
    """What one program does."""

    chunk: int
    """Inputs of one stage: 64, or a multiple of it."""
    stages: int
    parts: int = 1
    """Programs that share the inner dimension."""

    def ring_bytes(self, kind: MatrixKind, columns: int) -> int:
        """Shared memory of one program."""
        matrices = 2 if kind == "gate_up" else 1
        return (matrices * BLOCK_ROWS + columns) * self.chunk * 2 * self.stages


TILES: dict[tuple[MatrixKind, int, int], dict[int, BlockTile]] = {
    ("gate_up", 2048, 8192): {
        16: BlockTile(256, 3),
        32: BlockTile(128, 5),
        64: BlockTile(128, 4),
        128: BlockTile(128, 3),
    },
    ("down", 8192, 2048): {
        16: BlockTile(128, 10, 4),
        32: BlockTile(256, 4, 4),
        64: BlockTile(256, 3, 2),
        128: BlockTile(128, 4, 4),
    },
    ("qkv", 2048, 3072): {16: BlockTile(256, 5), 32: BlockTile(128, 4), 64: BlockTile(256, 3), 128: BlockTile(128, 4)},
    ("o", 2048, 2048): {
        16: BlockTile(256, 4, 2),
        32: BlockTile(256, 4, 2),
        64: BlockTile(256, 3, 2),
        128: BlockTile(256, 2, 4),
    },
    ("head", 2048, 128256): {
        16: BlockTile(256, 5),
        32: BlockTile(256, 4),
        64: BlockTile(256, 3),
        128: BlockTile(128, 2),
    },
    ("gate_up", 576, 1536): {16: BlockTile(256, 3), 32: BlockTile(128, 5)},
    ("down", 1536, 576): {16: BlockTile(256, 3, 2)},
    ("qkv", 576, 960): {16: BlockTile(256, 3), 32: BlockTile(128, 5)},
    ("o", 576, 576): {16: BlockTile(256, 2, 2), 32: BlockTile(256, 3)},
    ("head", 576, 49152): {16: BlockTile(128, 5), 32: BlockTile(128, 4)},
    ("gate_up", 1536, 8960): {16: BlockTile(256, 3), 32: BlockTile(64, 5)},
    ("down", 8960, 1536): {16: BlockTile(128, 10, 4), 32: BlockTile(256, 4, 2)},
    ("qkv", 1536, 2048): {16: BlockTile(256, 5), 32: BlockTile(256, 4)},
    ("o", 1536, 1536): {16: BlockTile(256, 5), 32: BlockTile(256, 3, 2)},
    ("head", 1536, 151936): {16: BlockTile(128, 10), 32: BlockTile(256, 4)},
    ("gate_up", 4096, 11008): {32: BlockTile(128, 5)},
    ("down", 11008, 4096): {32: BlockTile(128, 4, 2)},
    ("qkv", 4096, 12288): {32: BlockTile(256, 4)},
    ("o", 4096, 4096): {32: BlockTile(128, 4, 2)},
    ("head", 4096, 32000): {32: BlockTile(256, 4)},
    ("gate_up", 4096, 12288): {32: BlockTile(128, 5)},
    ("down", 12288, 4096): {32: BlockTile(128, 4, 2)},
    ("qkv", 4096, 6144): {32: BlockTile(128, 9)},
    ("head", 4096, 151936): {32: BlockTile(256, 4)},
}
"""Measured on an H200: (kind, inputs, outputs) -> the smallest number of columns from which a tile holds, if it fits."""


def columns_for(rows: int) -> int:
    """Rows with their padding: the right side of a tensor-core tile."""
    return max(power_of_two(rows), _MIN_COLUMNS)


def block_tile_for(kind: MatrixKind, size: int, out: int, rows: int) -> BlockTile:
    """The tile of a matrix [out, size] for `rows` vectors."""
    columns = columns_for(rows)
    measured = TILES.get((kind, size, out), {})
    known = [least for least in measured if least <= columns]
    tile = measured[max(known)] if known else default_tile(kind, size, out, columns)
    return tile if tile.ring_bytes(kind, columns) <= _MAX_RING_BYTES else default_tile(kind, size, out, columns)


def default_tile(kind: MatrixKind, size: int, out: int, columns: int) -> BlockTile:
    """For shapes that nobody has measured."""
    programs, parts = -(-out // BLOCK_ROWS), 1
    while kind in _SUMMED and programs * parts < _FULL and size // (2 * parts) >= 4 * BLOCK_ROWS:
        parts *= 2
    chunk = 64 if kind == "gate_up" else 128
    bytes_a_stage = BlockTile(chunk, 1).ring_bytes(kind, columns)
    parts, share = _shares(size, chunk, parts)
    return BlockTile(chunk, max(min(_RING_BYTES // bytes_a_stage, share, _MAX_STAGES), 1), parts)


def candidates(kind: MatrixKind, size: int, columns: int) -> list[BlockTile]:
    """Tiles worth measuring for a matrix with `size` inputs."""
    found: dict[BlockTile, None] = {}
    parts_tried = (1, 2, 4, 8) if kind in _SUMMED else (1,)
    chunks = (64, 128, 256) if kind == "gate_up" else (128, 256)
    for chunk, parts, budget in product(chunks, parts_tried, (_RING_BYTES // 2, _RING_BYTES, _MAX_RING_BYTES)):
        used, share = _shares(size, chunk, parts)
        stages = min(budget // BlockTile(chunk, 1).ring_bytes(kind, columns), share, _MAX_STAGES)
        if stages >= min(3, share):
            found[BlockTile(chunk, stages, used)] = None
    return list(found)


def _shares(size: int, chunk: int, parts: int) -> tuple[int, int]:
    """Programs that have something to do when `parts` share the chunks evenly, and chunks of one of them."""
    num_chunks = -(-size // chunk)
    share = -(-num_chunks // parts)
    return -(-num_chunks // share), share
