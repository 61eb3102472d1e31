from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.graphs.captured import CapturedGraph
from worker.graphs.errors import AddressChanged, GraphReleased, InputMismatch, OutputOverwritten
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion


class Setup:
    """Two graphs in one pool: x + 1 and x + 2."""

    def __init__(self, *, use_pool: bool = True) -> None:
        self.x = torch.zeros(3)
        self.recorder = GraphRecorder(GraphPool(FakeCapture(), use_pool=use_pool))
        self.first = self.graph(1, lambda: self.x + 1)
        self.second = self.graph(2, lambda: self.x + 2)

    def graph(self, bucket: int, run: Callable[[], Any]) -> CapturedGraph:
        key, region = GraphKey("decode", 0, bucket), CaptureRegion(run=run, inputs={"x": self.x})
        self.recorder.warm_up(key, region)
        return self.recorder.capture(key, region)


@pytest.fixture
def pair() -> Setup:
    return Setup()


def test_outputs_are_read_inside_the_block(pair: Setup) -> None:
    pair.first.load({"x": torch.tensor([1.0, 2.0, 3.0])})
    with pair.first.replay() as output:
        assert (output * 1).tolist() == [2, 3, 4]
        assert output.shape == (3,)


@pytest.mark.parametrize(
    "use",
    [
        lambda out: out + 1,
        lambda out: out.tolist(),
        lambda out: out[0],
        lambda out: out.view(3, 1),
        lambda out: torch.stack([out, out]),
        lambda out: torch.zeros(3).copy_(out),
        lambda out: out.data_ptr(),
        lambda out: out.numpy(),
    ],
)
def test_no_use_of_an_output_goes_unnoticed_after_its_block(pair: Setup, use: Callable[[Tensor], Any]) -> None:
    with pair.first.replay() as output:
        use(output)
    with pytest.raises(OutputOverwritten, match="decode/t0/b1"):
        use(output)


def test_views_of_an_output_die_with_it_and_computed_values_live(pair: Setup) -> None:
    with pair.first.replay() as output:
        views, computed = (output.view(1, 3), output[1:], output.view(1, 3).T), output * 10
        exported = output.numpy()
    for dead in views:
        with pytest.raises(OutputOverwritten):
            dead.sum()
    pair.second.replay()
    assert computed.tolist() == [10, 10, 10]
    assert exported.tolist() == [1, 1, 1], "an exported array is a copy"


def test_shape_and_dtype_can_be_asked_for_ever(pair: Setup) -> None:
    with pair.first.replay() as output:
        pass
    assert (output.shape, output.dtype, output.dim(), output.device.type) == ((3,), torch.float32, 1, "cpu")


def test_a_replay_of_the_pool_inside_the_block_is_refused(pair: Setup) -> None:
    with pair.first.replay() as output:
        for graph in (pair.first, pair.second):
            with pytest.raises(OutputOverwritten, match="being read"):
                graph.replay()
        assert (output + 0).tolist() == [1, 1, 1], "the refused replay did not touch it"
    pair.second.replay()


def test_a_lease_without_a_block_ends_at_the_next_replay(pair: Setup) -> None:
    lease = pair.first.replay()
    output = lease.outputs
    assert (output + 0).tolist() == [1, 1, 1]
    pair.second.replay()
    for read in (lambda: output + 0, lambda: lease.outputs, lease.clone, lambda: lease.copy_to([torch.zeros(3)])):
        with pytest.raises(OutputOverwritten, match="1 replay"):
            read()


def test_a_clone_belongs_to_the_caller(pair: Setup) -> None:
    mine = pair.first.replay().clone()
    pair.second.replay()
    assert type(mine) is Tensor
    assert mine.tolist() == [1, 1, 1]


def test_private_pools_only_protect_a_graph_from_itself() -> None:
    pair = Setup(use_pool=False)
    lease = pair.first.replay()
    pair.second.replay()
    assert lease.clone().tolist() == [1, 1, 1]
    pair.first.replay()
    with pytest.raises(OutputOverwritten):
        lease.clone()


def test_outputs_keep_their_structure(pair: Setup) -> None:
    graph = pair.graph(3, lambda: {"a": pair.x + 1, "rest": [pair.x * 2, "label", None]})
    with graph.replay() as outputs:
        assert outputs["a"].tolist() == [1, 1, 1]
        assert outputs["rest"][1:] == ["label", None]
    with pytest.raises(OutputOverwritten):
        outputs["rest"][0].sum()


def test_an_error_inside_the_block_ends_the_lease(pair: Setup) -> None:
    with pytest.raises(ZeroDivisionError), pair.first.replay():
        1 / 0  # noqa: B018 - the error is the point
    pair.second.replay()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": torch.zeros(4)}, r"shape \[3\], now \[4\]"),
        ({"x": torch.zeros(3, dtype=torch.float64)}, r"torch.float32, now torch.float64"),
        ({"x": torch.zeros(3, device="meta")}, "on cpu, now meta"),
        ({}, r"missing: \['x'\]"),
        ({"x": torch.zeros(3), "y": torch.zeros(3)}, r"unexpected: \['y'\]"),
    ],
)
def test_an_input_that_differs_is_refused_with_expected_and_actual(
    pair: Setup, values: dict[str, Tensor], message: str
) -> None:
    pair.x.fill_(5)
    with pytest.raises(InputMismatch, match=message):
        pair.first.load(values)
    assert pair.x.tolist() == [5, 5, 5]


def test_a_moved_static_buffer_is_named(pair: Setup) -> None:
    pair.first.verify_addresses()
    pair.x.data = torch.zeros(3)
    with pytest.raises(AddressChanged, match="input x"):
        pair.first.verify_addresses()


def test_everything_the_graph_read_stays_alive(pair: Setup) -> None:
    weight = torch.full((3,), 4.0)
    graph = pair.graph(3, lambda: pair.x + weight)
    alive = {id(tensor) for tensor in graph._kept_alive}
    assert {id(weight), id(pair.x)} <= alive


def test_a_released_graph_cannot_be_replayed(pair: Setup) -> None:
    pair.recorder.release(pair.first)
    assert pair.first.is_released
    with pytest.raises(GraphReleased):
        pair.first.replay()
    assert pair.second.replay().clone().tolist() == [2, 2, 2]
