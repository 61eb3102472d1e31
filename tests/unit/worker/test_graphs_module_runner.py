from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.graphs.errors import (
    AddressChanged,
    CaptureOutOfMemory,
    InputMismatch,
    MissingWarmUp,
    OutputOverwritten,
    ShapeNotCaptured,
    StaleState,
    UnregisteredRandomness,
)
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.pool import GraphPool


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)).eval()


def captured(module: nn.Module, sample: Any, **options: Any) -> CUDAGraphRunner:
    runner = CUDAGraphRunner(**options)
    runner.warmup(module, sample)
    runner.capture(module, sample)
    return runner


class Counting(nn.Module):
    """Keeps a running sum of everything it has seen, as a cache does."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return x + self.seen


class Options(nn.Module):
    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, scale: float = 1.0, extra: dict[str, Tensor]) -> Any:
        return {"sum": (x + pair[0] * pair[1]) * scale, "extra": extra["bias"] + 1}


@pytest.mark.parametrize("copy", ["same_stream", "copy_stream"])
@pytest.mark.parametrize("use_pool", [True, False])
def test_replay_equals_eager_for_new_inputs(copy: Any, use_pool: bool) -> None:
    module = mlp()
    runner = captured(module, torch.randn(3, 8), copy=copy, use_pool=use_pool)
    for _ in range(3):
        x = torch.randn(3, 8)
        with runner.replay(x) as output:
            torch.testing.assert_close(output + 0, module(x))


def test_nested_and_named_arguments_and_dict_outputs() -> None:
    module = Options()

    def inputs(seed: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(seed)
        x, a, b, bias = torch.rand(4, 3, generator=rng).unbind()
        return {"x": x, "pair": (a, b), "scale": 2.0, "extra": {"bias": bias}}

    runner = captured(module, inputs(1))
    outputs = runner.replay(**inputs(2)).clone()
    expected = module(**inputs(2))
    assert outputs.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(outputs[name], expected[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 3.0}, "scale was captured as 2.0, now 3.0"),
        ({"pair": (torch.ones(3), 1.0)}, "captured as a tensor, now 1.0"),
        ({"pair": (torch.ones(3),)}, r"missing: \['pair.1'\]"),
        ({"extra": {"bias": torch.ones(3), "more": torch.ones(3)}}, r"unexpected: \['extra.more'\]"),
        ({"x": torch.ones(2)}, r"shape \[3\], now \[2\]"),
    ],
)
def test_a_call_that_differs_from_the_captured_one_is_refused(change: dict[str, Any], message: str) -> None:
    inputs = {
        "x": torch.ones(3),
        "pair": (torch.ones(3), torch.ones(3)),
        "scale": 2.0,
        "extra": {"bias": torch.ones(3)},
    }
    runner = captured(Options(), inputs)
    with pytest.raises(InputMismatch, match=message):
        runner.replay(**(inputs | change))


def test_capture_without_warm_up_or_at_another_shape_is_refused() -> None:
    module, runner = mlp(), CUDAGraphRunner()
    with pytest.raises(MissingWarmUp):
        runner.capture(module, torch.randn(3, 8))
    runner.warmup(module, torch.randn(3, 8))
    with pytest.raises(MissingWarmUp):
        runner.capture(module, torch.randn(4, 8))
    with pytest.raises(MissingWarmUp):
        runner.capture(mlp(), torch.randn(3, 8))
    with pytest.raises(ShapeNotCaptured):
        runner.replay(torch.randn(3, 8))


def test_too_few_warm_up_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        CUDAGraphRunner().warmup(mlp(), torch.randn(3, 8), num_steps=1)


def test_static_inputs_of_the_caller_are_used() -> None:
    module, static = mlp(), torch.zeros(3, 8)
    runner = CUDAGraphRunner()
    runner.warmup(module, torch.randn(3, 8))
    runner.capture(module, torch.randn(3, 8), static_inputs=static)
    static.copy_(x := torch.randn(3, 8))
    torch.testing.assert_close(runner.graph.replay().clone(), module(x))
    with pytest.raises(InputMismatch, match="static input 0"):
        runner.capture(module, torch.randn(3, 8), static_inputs=torch.zeros(2, 8))


def test_the_samples_are_not_touched() -> None:
    sample = torch.ones(3, 8)
    runner = captured(mlp(), sample)
    runner.replay(torch.zeros(3, 8))
    assert sample.eq(1).all()


def test_outputs_die_at_the_next_replay() -> None:
    runner = captured(mlp(), torch.randn(3, 8))
    lease = runner.replay(torch.randn(3, 8))
    runner.replay(torch.randn(3, 8))
    with pytest.raises(OutputOverwritten):
        lease.clone()


def test_a_replaced_weight_is_noticed_unless_asked_not_to() -> None:
    x, state = torch.randn(3, 8), {"0.weight": torch.zeros(16, 8)}
    module = mlp()
    runner = captured(module, x)
    module.load_state_dict(state, strict=False)
    torch.testing.assert_close(runner.replay(x).clone(), module(x))
    module.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(AddressChanged, match=r"0\.weight"):
        runner.replay(x)
    careless = captured(mlp(), x, check_addresses=False)
    careless.replay(x)


def test_a_module_that_changes_its_state_needs_a_reset() -> None:
    module, x = Counting(), torch.ones(3)
    with pytest.raises(StaleState, match="outlives the region"):
        CUDAGraphRunner().warmup(module, x)
    module.seen.zero_()
    runner = CUDAGraphRunner()
    runner.warmup(module, x, reset=lambda: module.seen.zero_())
    runner.capture(module, x)
    assert runner.replay(x).clone().tolist() == [4, 4, 4]
    assert runner.replay(x).clone().tolist() == [7, 7, 7]


def test_declared_state_is_saved_over_the_warm_up() -> None:
    module = Counting()
    module.seen += 10
    runner = CUDAGraphRunner()
    runner.warmup(module, torch.ones(3), state={"seen": module.seen})
    runner.capture(module, torch.ones(3))
    assert module.seen == 10
    assert runner.replay(torch.ones(3)).clone().tolist() == [14, 14, 14]


def test_dropout_needs_a_registered_generator_or_eval() -> None:
    module, x = nn.Dropout(0.5).train(), torch.ones(64)
    with pytest.raises(UnregisteredRandomness):
        CUDAGraphRunner().warmup(module, x)
    runner = CUDAGraphRunner()
    runner.warmup(module, x, generators=[torch.default_generator])
    runner.capture(module, x)
    first, second = runner.replay(x).clone(), runner.replay(x).clone()
    assert not torch.equal(first, second)
    assert torch.equal(captured(module.eval(), x).replay(x).clone(), x)


def test_runners_can_share_a_pool_and_then_protect_each_others_outputs() -> None:
    pool = GraphPool(FakeCapture())
    x = torch.randn(3, 8)
    first, second = captured(mlp(), x, pool=pool), captured(mlp(), x, pool=pool)
    lease = first.replay(x)
    second.replay(x)
    with pytest.raises(OutputOverwritten):
        lease.clone()


def test_a_pool_limit_is_enforced_and_a_new_capture_replaces_the_old() -> None:
    module, x = mlp(), torch.randn(64, 8)
    runner = CUDAGraphRunner(max_pool_bytes=100)
    runner.warmup(module, x)
    with pytest.raises(CaptureOutOfMemory):
        runner.capture(module, x)
    runner = captured(module, x)
    old = runner.graph
    runner.capture(module, x)
    assert old.is_released
    assert not runner.graph.is_released
    runner.close()
    with pytest.raises(ShapeNotCaptured):
        runner.replay(x)


def test_an_unknown_copy_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="copy mode"):
        CUDAGraphRunner(copy="other").warmup(mlp(), torch.randn(3, 8))  # type: ignore[arg-type]
