from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from worker.graphs.errors import HostSyncInRegion
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.partial import PartialGraphs
from worker.graphs.pool import GraphPool


class Mlp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return self.down(torch.relu(self.up(x))) * scale


class Routing(nn.Module):
    """Cannot be captured: it looks at values."""

    def forward(self, x: Tensor) -> Any:
        return x if x.sum().item() > 0 else -x


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.routing, self.mlp = Routing(), Mlp(size)

    def forward(self, x: Tensor, scale: float) -> Any:
        return x + self.mlp(self.routing(x), scale=scale)


class Model(nn.Module):
    def __init__(self, layers: int = 3, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(8) for _ in range(layers))
        self.head = Mlp(8)
        if shared:
            for layer in self.layers:
                cast(Layer, layer).mlp = cast(Layer, self.layers[0]).mlp

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        skip = cast(Layer, self.layers[0]).mlp(x, scale=scale)
        for layer in self.layers[1:]:
            x = layer(x, scale)
        return self.head(x + skip)


def is_mlp(_: str, module: nn.Module) -> bool:
    return isinstance(module, Mlp)


def partial(model: nn.Module, *shapes: tuple[int, ...], chooses: Any = is_mlp) -> PartialGraphs:
    graphs = PartialGraphs(model, chooses, pool=GraphPool(FakeCapture()))
    for shape in shapes:
        graphs.capture((torch.rand(shape),))
    return graphs


def test_chosen_parts_replay_and_the_rest_is_eager() -> None:
    model, plain = Model(), Model()
    graphs = partial(model, (2, 8))
    assert graphs.names == ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "head")
    for sign in (1, -1):
        x = torch.rand(2, 8) * sign
        torch.testing.assert_close(model(x), plain(x))
    assert dict(graphs.graph_calls) == dict.fromkeys(graphs.names, 2)


def test_an_early_output_survives_the_later_replays_of_a_pass() -> None:
    model, plain, x = Model(5), Model(5), torch.rand(2, 8)
    partial(model, (2, 8))
    torch.testing.assert_close(model(x), plain(x))


def test_what_leaves_the_model_is_not_overwritten_by_the_next_pass() -> None:
    model = Model()
    partial(model, (2, 8))
    first = model(torch.rand(2, 8))
    kept = first.clone()
    model(torch.rand(2, 8))
    assert torch.equal(first, kept)


def test_other_shapes_and_other_numbers_run_eagerly_and_are_counted() -> None:
    model, plain = Model(), Model()
    graphs = partial(model, (2, 8))
    x = torch.rand(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x[:2], 2.0), plain(x[:2], 2.0))
    assert graphs.eager_calls["layers.0.mlp"] == 2
    assert graphs.eager_calls["head"] == 1
    assert graphs.graph_calls["head"] == 1


def test_several_shapes_are_captured_side_by_side() -> None:
    model, plain = Model(), Model()
    graphs = partial(model, (4, 8), (2, 8), (4, 8))
    for rows in (4, 2, 4):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(model(x), plain(x))
    assert graphs.graph_calls["head"] == 3


def test_a_part_that_is_called_twice_in_a_pass_is_replayed_once() -> None:
    model, plain, x = Model(shared=True), Model(shared=True), torch.rand(2, 8)
    graphs = partial(model, (2, 8))
    torch.testing.assert_close(model(x), plain(x))
    assert graphs.graph_calls["layers.0.mlp"] == 1
    assert graphs.eager_calls["layers.0.mlp"] == 2


def test_gradients_are_not_lost_to_a_graph() -> None:
    model = Model()
    partial(model, (2, 8))
    x = torch.rand(2, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def test_removal_gives_the_model_back() -> None:
    model, x = Model(), torch.rand(2, 8)
    expected = model(x)
    graphs = partial(model, (2, 8))
    graphs.remove()
    assert "forward" not in vars(model.head)
    torch.testing.assert_close(model(x), expected)
    assert not graphs.graph_calls


def test_a_part_that_cannot_be_captured_is_named() -> None:
    with pytest.raises(HostSyncInRegion, match="routing"):
        partial(Model(), (2, 8), chooses=lambda _, module: isinstance(module, Routing))
    with pytest.raises(ValueError, match="no submodule"):
        partial(Model(), chooses=lambda *_: False)
