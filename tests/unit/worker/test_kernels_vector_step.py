"""Whole decode steps in matrix-vector kernels against plain torch. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.small_steps import FAMILIES, WIDTH, Decoding, steps, tiny
from worker.kernels.early_plan import EarlyPlan
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.vector_tiles import Tile
from worker.triton_kernels import TritonKernels

TILES = {
    "all at once": Tile(4, 1, 64),
    "paced": Tile(4, 1, 16, 1),
    "paced by halves": Tile(2, 1, 16, 2),
    "warps abreast": Tile(8, 4, 64, 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_stay_near_single_precision_and_choose_the_largest_logit(family: str) -> None:
    for step in steps((1, 30, 125), 2, **FAMILIES[family]):
        assert step.error < 3e-2
        assert torch.equal(step.ours[1][:, 0], step.ours[0].argmax(-1))
        assert step.ours[1][:, 1].all()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_any_small_number_of_rows_in_float16(rows: int) -> None:
    (step,) = steps((5, 64, 65, 2)[:rows], dtype=torch.float16, num_layers=2)
    assert step.error < 5e-3


@pytest.mark.parametrize("tile", TILES)
def test_every_way_of_cutting_gives_the_same_step(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(kind: MatrixKind, *_: int) -> Tile:
        return Tile(4, 1, 32) if kind == "o" and TILES[tile].abreast > 1 else TILES[tile]

    monkeypatch.setattr("worker.model.vector_step.tile_for", cut)
    (step,) = steps((9, 40))
    assert step.error < 3e-2


def test_a_long_row_is_merged_by_the_last_of_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = EarlyPlan(num_splits=5, late_splits=2, min_chunk=16, long_chunk=16, tile=16)
    monkeypatch.setattr("worker.model.vector_attention.early_plan", lambda **_: plan)
    for step in steps((126, 20, 1), 2):
        assert step.error < 3e-2


def test_other_types_and_shapes_are_left_to_the_other_kernels() -> None:
    for changes, dtype in (({}, torch.float32), ({"head_dim": 12}, torch.bfloat16)):
        model = tiny(dtype, **changes)
        decoding = Decoding(model, (5,), dtype)
        kernels = TritonKernels(decoding.cache, num_heads=4, max_rows=1, gemv_rows=1)
        assert kernels.whole_step(model, decoding.inputs.views(1, WIDTH)) is None


def test_more_rows_than_the_limit_are_left_to_the_other_kernels() -> None:
    model = tiny(torch.bfloat16)
    decoding = Decoding(model, (5, 6), torch.bfloat16)
    kernels = TritonKernels(decoding.cache, num_heads=4, max_rows=2, gemv_rows=1)
    assert kernels.whole_step(model, decoding.inputs.views(2, WIDTH)) is None
    assert kernels.whole_step(model, decoding.inputs.views(1, WIDTH)) is not None
