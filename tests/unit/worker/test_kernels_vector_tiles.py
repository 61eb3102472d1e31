from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels.early_plan import early_plan
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.vector_tiles import MAX_NUMBERS_A_THREAD, TILES, candidates, default_tile, tile_for

KINDS: list[MatrixKind] = ["qkv", "o", "gate_up", "down", "head"]


def test_no_measured_tile_leaves_the_registers() -> None:
    for (kind, size, _), by_rows in TILES.items():
        for tile in by_rows.values():
            assert tile.numbers_a_thread(kind, size) <= MAX_NUMBERS_A_THREAD


@given(kind=st.sampled_from(KINDS), size=st.integers(1, 8192).map(lambda n: 8 * n))
def test_unknown_shapes_get_a_tile_that_fits_or_none(kind: MatrixKind, size: int) -> None:
    tile = default_tile(kind, size)
    if tile is None:
        assert size > 16_384
        return
    assert tile.numbers_a_thread(kind, size) <= MAX_NUMBERS_A_THREAD
    assert tile.chunk & (tile.chunk - 1) == 0
    assert tile.out % tile.abreast == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [576, 1536, 2048, 4096, 8192, 8960, 11008, 12288])
def test_there_are_candidates_for_every_public_shape(kind: MatrixKind, size: int) -> None:
    found = candidates(kind, size, head_dim=64)
    assert len(found) >= 2
    assert all(tile.numbers_a_thread(kind, size) <= MAX_NUMBERS_A_THREAD for tile in found)
    assert all(tile.abreast == 1 and tile.chunk >= 64 for tile in found if kind == "o")


def test_a_tile_holds_from_its_number_of_rows_on() -> None:
    assert tile_for("head", 2048, 128256, 1) == TILES["head", 2048, 128256][1]
    assert tile_for("head", 2048, 128256, 4) == TILES["head", 2048, 128256][max(TILES["head", 2048, 128256])]
    assert tile_for("head", 2048, 999, 1) == default_tile("head", 2048)


@given(
    rows=st.integers(1, 8),
    num_kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([8, 64, 128, 256]),
    width=st.integers(1, 131_072),
)
def test_the_programs_of_a_plan_reach_every_token(rows: int, num_kv_heads: int, head_dim: int, width: int) -> None:
    plan = early_plan(rows=rows, num_kv_heads=num_kv_heads, head_dim=head_dim, width=width, num_sms=132)
    assert plan.late_splits <= plan.num_splits
    for length in {1, width // 3, width - 1} - {0, -1}:
        is_short = length <= plan.late_splits * plan.long_chunk
        splits = plan.late_splits if is_short else plan.num_splits
        least = 1 if is_short else plan.long_chunk
        chunk = -(-max(-(-length // splits), least) // plan.min_chunk) * plan.min_chunk
        assert -(-length // chunk) <= plan.num_splits
        assert not is_short or -(-length // chunk) <= plan.late_splits
