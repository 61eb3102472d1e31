"""Steps of one row whose attention is one program a head, which nothing but a GPU can run: plain torch stands in for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import SHAPES
from tests.fakes import reference_kernels as reference
from tests.fakes.small_steps import BLOCK_SIZE, FAMILIES, WIDTH, steps
from worker.kernels.short_plan import MAX_GROUP, PLANS, ShortPlan, candidates, short_plan
from worker.kernels.vector_tiles import MAX_NUMBERS_A_THREAD, Tile
from worker.model.architecture import DecoderConfig

FITS = ShortPlan(num_warps=2, share=16, num_tiles=WIDTH * BLOCK_SIZE // 32, eager=False, projection=Tile(2, 1, 16, 1))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ShortPlan]:
    """Plans of the launches that plain torch stood in for."""
    launched: list[ShortPlan] = []

    def attend(*arguments: Any, out: torch.Tensor) -> None:
        launched.append(arguments[-1])
        reference.short_attention(*arguments[:-1], out=out)

    monkeypatch.setattr("worker.kernels.short_attention.short_attention", attend)
    monkeypatch.setattr("worker.model.vector_step.short_plan", lambda *_, width: FITS if width <= 128 else None)
    return launched


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_stay_near_single_precision_and_choose_the_largest_logit(family: str, seen: list[ShortPlan]) -> None:
    for length in (1, 30, 125):
        for step in steps((length,), 2, **FAMILIES[family]):
            assert step.error < 3e-2
            assert torch.equal(step.ours[1][:, 0], step.ours[0].argmax(-1))
    assert seen == [FITS] * 6


def test_several_rows_and_wide_tiers_share_their_tokens_among_programs(seen: list[ShortPlan]) -> None:
    for lengths, width in (((5, 6), WIDTH), ((5,), WIDTH + 1)):
        for step in steps(lengths, width=width):
            assert step.error < 3e-2
    assert not seen


def test_without_gluon_programs_share_their_tokens(seen: list[ShortPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model.vector_step.has_gluon", lambda: False)
    for step in steps((5,)):
        assert step.error < 3e-2
    assert not seen


def test_measured_plans_are_of_public_shapes_and_of_heads_that_a_product_holds() -> None:
    configs = [DecoderConfig.from_dict(shape) for shape in SHAPES.values()]
    public = {(config.num_heads, config.num_kv_heads, config.head_dim) for config in configs}
    assert public >= set(PLANS)
    for num_heads, num_kv_heads, head_dim in PLANS:
        assert num_heads // num_kv_heads <= MAX_GROUP
        assert head_dim in (32, 64, 128, 256)


def test_projections_of_measured_plans_fit_the_registers() -> None:
    for (num_heads, _, head_dim), plans in PLANS.items():
        for plan in plans:
            if plan.projection is not None:
                assert plan.projection.numbers_a_thread("o", num_heads * head_dim) <= MAX_NUMBERS_A_THREAD


def test_plans_of_a_shape_are_for_ever_wider_tiers() -> None:
    for plans in PLANS.values():
        widths = [plan.max_width for plan in plans]
        assert widths == sorted(set(widths))


@pytest.mark.parametrize(("head_dim", "width"), [(64, 256), (64, 512), (128, 256)])
def test_candidates_hold_the_tier_and_every_measured_plan_is_one(head_dim: int, width: int) -> None:
    found = candidates(head_dim, width)
    assert all(plan.max_width >= width for plan in found)
    planned = [short_plan(*shape, width=width) for shape in PLANS if shape[2] == head_dim]
    measured = [replace(plan, projection=None) for plan in planned if plan is not None]
    assert measured
    assert set(measured) <= set(found)


@given(width=st.integers(1, 1 << 17), shape=st.sampled_from([*PLANS, (7, 7, 7)]))
def test_a_plan_holds_every_token_of_its_tier(width: int, shape: tuple[int, int, int]) -> None:
    plan = short_plan(*shape, width=width)
    assert (plan is not None) == (shape in PLANS and width <= PLANS[shape][-1].max_width)
    if plan is not None:
        assert plan.num_warps * plan.share * plan.num_tiles >= width
        assert plan.share >= 16
