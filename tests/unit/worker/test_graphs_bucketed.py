from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.graphs.bucketed import BucketedGraphRunner, PaddedAxes
from worker.graphs.dispatcher import MissReason
from worker.graphs.errors import HostSyncInRegion, InputMismatch, ShapeNotCaptured
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.pool import GraphPool


class Attention(nn.Module):
    """One attention layer whose mask makes padded positions inert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Any:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, float("-inf"))
        return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, :])) * scale


AXES = {"x": PaddedAxes(length_dim=1), "mask": PaddedAxes(length_dim=1)}


def inputs(batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, length, 16, generator=rng), "mask": torch.ones(batch, length, dtype=torch.int64)}


def attention_runner(**options: Any) -> BucketedGraphRunner:
    values: dict[str, Any] = {
        "batch_sizes": (1, 2, 4),
        "lengths": (8, 16),
        "axes": AXES,
        "output_axes": PaddedAxes(length_dim=1),
    }
    return BucketedGraphRunner(Attention().eval(), inputs(1, 8), **(values | options))


def test_every_shape_up_to_the_largest_equals_eager() -> None:
    runner = attention_runner()
    runner.capture()
    assert len(runner.session.graphs) == 6
    assert not runner.dispatcher.quarantined
    for batch in (1, 2, 3, 4):
        for length in (1, 7, 8, 9, 16):
            given = inputs(batch, length, seed=batch * 100 + length)
            torch.testing.assert_close(runner(**given), Attention().eval()(**given), rtol=1e-5, atol=1e-6)
    assert sum(runner.dispatcher.replays.values()) == 20
    assert not runner.dispatcher.misses


def test_a_small_call_after_a_large_one_sees_no_leftovers() -> None:
    runner = attention_runner(batch_sizes=(4,), lengths=(16,))
    runner.capture()
    runner(**inputs(4, 16, seed=1))
    small = inputs(1, 3, seed=2)
    torch.testing.assert_close(runner(**small), Attention().eval()(**small), rtol=1e-5, atol=1e-6)


def test_outputs_belong_to_the_caller() -> None:
    runner = attention_runner()
    runner.capture()
    first = runner(**inputs(1, 8, seed=1))
    kept = first.clone()
    runner(**inputs(1, 8, seed=2))
    assert torch.equal(first, kept)


def test_arguments_that_are_no_tensors_are_baked_in() -> None:
    runner = attention_runner(baked={"scale": 3.0})
    runner.capture()
    given = inputs(2, 8)
    torch.testing.assert_close(runner(**given), Attention().eval()(**given, scale=3.0), rtol=1e-5, atol=1e-6)


def test_a_call_over_the_largest_bucket_runs_eagerly_and_is_counted_or_raises() -> None:
    runner = attention_runner()
    runner.capture()
    given = inputs(5, 20)
    torch.testing.assert_close(runner(**given), Attention().eval()(**given))
    assert dict(runner.dispatcher.misses) == {MissReason.NOT_PLANNED: 1}
    strict = attention_runner(on_miss="raise")
    with pytest.raises(ShapeNotCaptured, match="5 rows at tier 20"):
        strict(**given)


def test_padding_that_is_not_inert_is_quarantined() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x - x.mean(dim=1, keepdim=True)

    runner = BucketedGraphRunner(
        Mean(),
        {"x": torch.rand(2, 8)},
        batch_sizes=(2,),
        lengths=(8,),
        axes={"x": PaddedAxes(length_dim=1)},
        output_axes=PaddedAxes(length_dim=1),
    )
    runner.capture()
    (reason,) = runner.dispatcher.quarantined.values()
    assert "padding is not inert" in reason
    given = torch.rand(1, 5)
    torch.testing.assert_close(runner(x=given), Mean()(given))


def test_rows_that_see_each_other_are_quarantined() -> None:
    class BatchNorm(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x - x.mean(dim=0)

    runner = BucketedGraphRunner(BatchNorm(), {"x": torch.rand(4, 3)}, batch_sizes=(4,))
    runner.capture()
    assert len(runner.dispatcher.quarantined) == 1


def test_token_ids_are_warmed_up_with_valid_values() -> None:
    model = nn.Embedding(10, 4)
    runner = BucketedGraphRunner(model, {"input": torch.tensor([3, 9])}, batch_sizes=(1, 8))
    runner.capture()
    torch.testing.assert_close(runner(input=torch.tensor([9, 1, 4])), model(torch.tensor([9, 1, 4])))


def test_memory_that_is_too_small_for_the_largest_buckets_keeps_the_small_ones() -> None:
    model = nn.Linear(64, 64)
    pool = GraphPool(FakeCapture(capacity_bytes=2 * 64 * 4))
    runner = BucketedGraphRunner(model, {"input": torch.rand(1, 64)}, batch_sizes=(1, 2, 4, 8), pool=pool)
    runner.capture()
    assert sorted(key.bucket for key in runner.session.graphs) == [1, 2]
    x = torch.rand(7, 64)
    torch.testing.assert_close(runner(input=x), model(x))
    assert dict(runner.dispatcher.misses) == {MissReason.DROPPED: 1}


def test_a_trap_in_the_module_raises() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * x.max().item()

    with pytest.raises(HostSyncInRegion, match=r"Tensor\.item"):
        BucketedGraphRunner(Bad(), {"x": torch.rand(2, 2)}).capture()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.rand(2, 8, 16)}, "called with"),
        ({"x": torch.rand(2, 8, 16), "mask": torch.ones(3, 8, dtype=torch.int64)}, "disagree"),
        ({"x": torch.rand(2, 8, 16), "mask": torch.ones(2, 7, dtype=torch.int64)}, "disagree"),
        ({"x": torch.rand(2, 8, 15), "mask": torch.ones(2, 8, dtype=torch.int64)}, "its bucket holds"),
        ({"x": torch.rand(2, 8, 16).half(), "mask": torch.ones(2, 8, dtype=torch.int64)}, "float16"),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused(given: dict[str, Tensor], message: str) -> None:
    runner = attention_runner()
    runner.capture()
    with pytest.raises(InputMismatch, match=message):
        runner(**given)


def test_axes_are_checked() -> None:
    with pytest.raises(ValueError, match="not in example"):
        attention_runner(axes=AXES | {"y": PaddedAxes()})
    with pytest.raises(ValueError, match="lengths"):
        attention_runner(lengths=())
