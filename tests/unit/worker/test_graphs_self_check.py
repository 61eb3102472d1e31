from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from worker.graphs.captured import CapturedGraph
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import SelfCheck, Tolerance, compare

ROWS = 4


def capture(run: Callable[[], object], **region: object) -> CapturedGraph:
    made = GraphRecorder(GraphPool(FakeCapture()))
    key = GraphKey("decode", 0, ROWS)
    built = CaptureRegion(run=run, **region)  # type: ignore[arg-type]
    made.warm_up(key, built, check=False)
    return made.capture(key, built)


def drawing(x: Tensor, valid: int = ROWS - 1) -> Callable[[torch.Generator, bool], int]:
    def draw(rng: torch.Generator, poison: bool) -> int:
        x.copy_(torch.rand(x.shape, generator=rng) + 1)
        x[valid:] = float("nan") if poison else 0.0
        return valid

    return draw


def test_a_graph_that_equals_eager_passes() -> None:
    x = torch.zeros(ROWS, 8)
    result = SelfCheck(num_rounds=3).check(capture(lambda: x @ x.T.clone()[:, :2] * 0 + x[:, :2], inputs={"x": x}))
    assert result.is_equal
    assert result.rows == ROWS
    assert result.max_abs_diff == 0


def test_padding_that_stays_in_its_rows_passes_although_it_is_poisoned() -> None:
    x = torch.zeros(ROWS, 8)
    result = SelfCheck().check(capture(lambda: x.softmax(dim=1), inputs={"x": x}, draw=drawing(x)))
    assert result.is_equal
    assert result.rows == ROWS - 1


def test_padding_that_leaks_into_valid_rows_is_found() -> None:
    x = torch.zeros(ROWS, 8)
    result = SelfCheck().check(capture(lambda: x - x.mean(dim=0), inputs={"x": x}, draw=drawing(x)))
    assert not result.is_equal
    assert result.max_abs_diff == float("inf")


def test_a_number_that_was_frozen_by_mistake_is_found() -> None:
    x, scale = torch.zeros(ROWS, 8), [1.0]
    graph = capture(lambda: {"logits": x * scale[0]}, inputs={"x": x}, draw=drawing(x))
    assert SelfCheck().check(graph).is_equal
    scale[0] = 1.5
    result = SelfCheck().check(graph)
    assert not result.is_equal
    assert "logits" in result.detail


def test_integer_outputs_must_be_equal() -> None:
    x, offset = torch.zeros(ROWS, 8), [0]
    graph = capture(lambda: x.argmax(dim=1) + offset[0], inputs={"x": x}, draw=drawing(x))
    assert SelfCheck().check(graph).is_equal
    offset[0] = 1
    assert not SelfCheck().check(graph).is_equal


def test_state_is_the_same_for_both_runs_and_put_back() -> None:
    x, cache = torch.zeros(ROWS, 8), torch.ones(ROWS, 8)
    graph = capture(lambda: cache.add_(x).clone(), inputs={"x": x}, state={"cache": cache}, draw=drawing(x))
    assert SelfCheck().check(graph).is_equal
    assert torch.equal(cache, torch.ones(ROWS, 8))


def test_random_regions_draw_the_same_numbers_and_the_generator_is_put_back() -> None:
    x, generator = torch.zeros(ROWS, 8), torch.Generator().manual_seed(3)
    graph = capture(
        lambda: x + torch.rand(x.shape, generator=generator), inputs={"x": x}, generators=(generator,), draw=drawing(x)
    )
    before = generator.get_state()
    assert SelfCheck(num_rounds=2).check(graph).is_equal
    assert torch.equal(generator.get_state(), before)


def test_without_a_draw_floats_are_random_and_integers_stay() -> None:
    ids, x = torch.tensor([1, 2, 3, 0]), torch.zeros(ROWS, 8)
    graph = capture(lambda: x[ids], inputs={"ids": ids, "x": x})
    assert SelfCheck().check(graph).is_equal
    assert ids.tolist() == [1, 2, 3, 0]
    assert x.std() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tolerance_per_type_or_one_for_all(dtype: torch.dtype) -> None:
    wanted = torch.ones(3, dtype=dtype)
    assert compare(wanted, wanted * (1 + 1e-12), rows=3).is_equal
    assert not compare(wanted, wanted * 1.5, rows=3).is_equal
    assert compare(wanted, wanted * 1.5, rows=3, tolerance=Tolerance(rtol=1, atol=0)).is_equal


def test_nan_equals_nan_only_and_shapes_must_match() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert compare(nan, nan.clone(), rows=2).is_equal
    assert not compare(nan, torch.zeros(2), rows=2).is_equal
    assert not compare(torch.zeros(2), torch.zeros(3), rows=2).is_equal


def test_at_least_one_round() -> None:
    with pytest.raises(ValueError, match="num_rounds"):
        SelfCheck(num_rounds=0)
