"""What the re-tuning of decode kernels tries, and how it prints what it found."""

from __future__ import annotations

import pytest

from bench import decode_tiles
from bench.kernels import Way, limits_of
from bench.read_speed import cache_bytes, step_bytes
from bench.shapes import SHAPES
from worker.kernels.block_tiles import BlockTile
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.row_tiles import RowTile
from worker.kernels.short_plan import ShortPlan
from worker.kernels.vector_tiles import Tile
from worker.model import vector_step


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("way", "rows"), [("vector", 1), ("rows", 8), ("blocks", 32)])
def test_every_matrix_has_candidates_of_the_ways_own_kind_and_the_shipped_tile_is_one(
    name: str, way: Way, rows: int
) -> None:
    kind_of = {"vector": Tile, "rows": RowTile, "blocks": BlockTile}[way]
    for kind in decode_tiles.KINDS:
        found = decode_tiles.candidates(name, way, rows, kind)
        assert len(found) >= 2
        assert all(isinstance(tile, kind_of) for tile in found)
        assert decode_tiles.shipped_tile(name, way, rows, kind) in found


def test_a_tile_is_printed_as_it_stands_in_the_table() -> None:
    tiles: list[Tile | RowTile | BlockTile] = [Tile(4, 2, 512, 1), RowTile(16, 4, 256, 8, 1), BlockTile(128, 4, 2)]
    shown = [decode_tiles.short(tile) for tile in tiles]
    assert shown == ["Tile(4, 2, 512, 1)", "RowTile(16, 4, 256, 8, 1)", "BlockTile(128, 4, 2)"]


class FakeRetune(decode_tiles.Retune):
    """Takes the time that a table says: one number for the shared way, less for wide programs and the best projection."""

    def _step_us(self, chosen: dict[MatrixKind, decode_tiles.Tile]) -> float:
        plan: ShortPlan | None = vars(vector_step)["short_plan"](0, 0, 0, width=0)
        if plan is None:
            return self.shared_us
        if plan.eager:
            raise RuntimeError("no room")
        return 100 - plan.num_warps - (plan.projection == Tile(2, 1, 256, 1))

    shared_us = 99.0


@pytest.mark.parametrize(("shared_us", "expected"), [(99.0, 91.0), (50.0, 50.0)])
def test_the_plan_of_a_short_tier_is_the_fastest_step(shared_us: float, expected: float) -> None:
    retune = FakeRetune("smollm2-135m", None, "vector", 1)  # type: ignore[arg-type]
    retune.shared_us = shared_us
    plan, us = retune.refine_plan({})
    assert us == expected
    assert (plan is None) == (shared_us == us)
    assert plan is None or (plan.num_warps, plan.eager, plan.projection) == (8, False, Tile(2, 1, 256, 1))
    assert retune.failed
    assert all("no room" in failure for failure in retune.failed)


def test_a_way_is_forced_by_its_own_limit_alone() -> None:
    assert limits_of("rows", 4) == {"gemv_rows": 0, "product_rows": 4, "block_rows": 0}
    assert set(limits_of("parts", 4).values()) == {0}
    assert limits_of("shipped", 4) == {}


def test_the_floor_counts_every_weight_once_and_the_live_cache() -> None:
    config = decode_tiles.config_of("llama-3.2-1b")
    assert step_bytes(config, 1, 0) == 2_471_493_632
    assert cache_bytes(config, 2, 1024) == 2 * 1024 * 32_768
    assert step_bytes(config, 2, 1024) == step_bytes(config, 1, 0) + cache_bytes(config, 2, 1024)
