"""Tiles of the tensor-core kernels: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels import block_tiles, row_tiles
from worker.kernels.block_tiles import BlockTile
from worker.kernels.early_plan import SHORT_TIER, rows_plan
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.row_tiles import RowTile

KINDS: list[MatrixKind] = ["qkv", "o", "gate_up", "down", "head"]
SIZES = [576, 1536, 2048, 4096, 8192, 8960, 11008, 12288]
SHARED_BYTES_OF_A_PROGRAM = 227 << 10
MAX_NUMBERS_A_THREAD = 384
"""Packed in pairs, with room for addresses and sums."""


def assert_rows_fit(tile: RowTile, size: int, columns: int) -> None:
    assert tile.chunk >= 64 * tile.num_warps
    assert tile.chunk & (tile.chunk - 1) == 0
    assert tile.ahead <= -(-size // tile.chunk)
    assert tile.numbers_a_thread(columns) <= MAX_NUMBERS_A_THREAD


def assert_block_fits(tile: BlockTile, kind: MatrixKind, size: int, columns: int) -> None:
    assert tile.stages >= 1
    assert tile.parts == 1 or kind in ("o", "down")
    num_chunks = -(-size // tile.chunk)
    share = -(-num_chunks // tile.parts)
    assert (tile.parts - 1) * share < num_chunks
    # The barriers of the ring lie beside it.
    assert tile.ring_bytes(kind, columns) + 16 * tile.stages <= SHARED_BYTES_OF_A_PROGRAM


@given(kind=st.sampled_from(KINDS), size=st.integers(1, 4096).map(lambda n: 8 * n), rows=st.integers(1, 16))
def test_unknown_shapes_get_a_tile_for_a_few_rows_that_fits(kind: MatrixKind, size: int, rows: int) -> None:
    columns = row_tiles.columns_for(rows)
    assert columns >= rows
    assert_rows_fit(row_tiles.default_tile(kind, size, columns), size, columns)


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 4096).map(lambda n: 8 * n),
    out=st.integers(1, 200_000),
    rows=st.integers(1, block_tiles.MAX_ROWS),
)
def test_unknown_shapes_get_a_block_that_fits(kind: MatrixKind, size: int, out: int, rows: int) -> None:
    columns = block_tiles.columns_for(rows)
    assert columns >= rows
    assert_block_fits(block_tiles.default_tile(kind, size, out, columns), kind, size, columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_there_are_candidates_for_every_public_shape_and_all_fit(kind: MatrixKind, size: int) -> None:
    for columns in (8, 16):
        found = row_tiles.candidates(kind, size, columns)
        assert len(found) >= 3
        for tile in found:
            assert_rows_fit(tile, size, columns)
    for columns in (8, 16, 32, 64):
        blocks = block_tiles.candidates(kind, size, columns)
        assert len(blocks) >= 2
        for block in blocks:
            assert_block_fits(block, kind, size, columns)


def test_every_measured_tile_fits() -> None:
    for (_, size, _), by_columns in row_tiles.TILES.items():
        for columns, tile in by_columns.items():
            assert_rows_fit(tile, size, columns)
    for (kind, size, _), blocks in block_tiles.TILES.items():
        for columns, block in blocks.items():
            assert_block_fits(block, kind, size, columns)


def test_a_measured_block_holds_only_for_the_columns_it_fits() -> None:
    for (kind, size, out), blocks in block_tiles.TILES.items():
        for rows in range(max(min(blocks) // 2 + 1, 1), block_tiles.MAX_ROWS + 1, 7):
            tile = block_tiles.block_tile_for(kind, size, out, rows)
            assert_block_fits(tile, kind, size, block_tiles.columns_for(rows))


@given(
    rows=st.integers(1, 128),
    num_kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([16, 64, 128, 256]),
    width=st.integers(1, 131_072),
    spare_shared=st.booleans(),
)
def test_the_programs_of_a_plan_for_rows_reach_every_token_and_leave_one_result(
    rows: int, num_kv_heads: int, head_dim: int, width: int, spare_shared: bool
) -> None:
    plan = rows_plan(
        rows=rows,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        width=width,
        num_sms=132,
        spare_shared=spare_shared,
    )
    assert plan.late_splits == 1
    for length in {1, width // 3, width - 1} - {0, -1}:
        is_short = length <= plan.long_chunk
        least = 1 if is_short else plan.long_chunk
        chunk = -(-max(-(-length // (1 if is_short else plan.num_splits)), least) // plan.min_chunk) * plan.min_chunk
        assert -(-length // chunk) <= plan.num_splits
    if width <= SHORT_TIER:
        assert plan.num_splits == 1
    if rows * num_kv_heads > 4 * 132:
        assert plan.tile <= 64
