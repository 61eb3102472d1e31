from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.graphs.bisect import describe_findings, find_failing_layer
from worker.graphs.errors import ControlFlowOnValues, DataDependentShape, HostSyncInRegion
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.smoke import smoke_test


class Experts(nn.Module):
    """Routes rows by value, as an eager mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0).long().eq(index).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), mlp

    def forward(self, x: Tensor, *, residual: bool = True) -> Any:
        return x * residual + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(mlp) for mlp in mlps)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, residual=True)
        return x


class PeeksItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if y.sum() > 0:
            y = -y
        return y


def test_a_capturable_model_has_no_failing_layer() -> None:
    assert find_failing_layer(Model(nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),)) is None


def test_the_innermost_layer_and_its_operator_are_found() -> None:
    model = Model(nn.Linear(8, 8), Experts(), nn.Linear(8, 8))
    found = find_failing_layer(model, (torch.randn(4, 8),))
    assert found is not None
    assert (found.path, found.layer) == ("layers.1.mlp", "Experts")
    assert isinstance(found.error, DataDependentShape)
    assert "aten.nonzero" in found.error.detail
    assert "test_graphs_bisect.py" in found.error.where
    tried = {attempt.path: bool(attempt.error) for attempt in found.attempts}
    assert tried["layers.0"] is False
    assert tried["layers.1"] is True
    assert tried["layers.1.norm"] is False
    assert "layers.2" not in tried, "the search stops at the first failing part"


def test_a_fault_in_a_layers_own_code_is_not_blamed_on_its_children() -> None:
    found = find_failing_layer(Model(PeeksItself()), (torch.randn(4, 8),))
    assert found is not None
    assert found.path == "layers.0.mlp"
    assert isinstance(found.error, ControlFlowOnValues)
    assert "in forward" in found.error.where


def test_a_model_that_fails_in_its_own_forward() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> float:
            return x.sum().item()

    found = find_failing_layer(Root(), kwargs={"x": torch.ones(2)})
    assert found is not None
    assert found.path == "(root)"
    assert isinstance(found.error, HostSyncInRegion)


def test_state_is_not_held_against_a_layer() -> None:
    assert find_failing_layer(nn.BatchNorm1d(8).train(), (torch.randn(4, 8),)) is None


def test_all_findings_of_a_model_in_one_run() -> None:
    lines = describe_findings(Model(Experts(), PeeksItself()), (torch.randn(4, 8),))
    assert len(lines) == 2
    assert any("nonzero" in line for line in lines)
    assert any("truth value" in line for line in lines)


def test_the_smoke_test_passes_and_reports_what_failed() -> None:
    good = smoke_test("cpu")
    assert good.is_ok
    assert good.detail == ""

    class Broken(FakeCapture):
        def capture(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA error: invalid argument")

    bad = smoke_test(backend=Broken())
    assert not bad.is_ok
    assert "Remedy" in bad.detail


def test_a_machine_without_a_gpu_fails_the_smoke_test_of_cuda() -> None:
    result = smoke_test("cuda")
    assert result.is_ok == torch.cuda.is_available()
    assert result.is_ok or "CUDA" in result.detail
