"""The emulation must behave as a CUDA graph does, or what it proves in continuous integration is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.graphs.fake_backend import FakeCapture, FakeGraph


def capture(run: Callable[[], Any], backend: FakeCapture | None = None, **options: Any) -> FakeGraph:
    backend = backend or FakeCapture()
    return backend.capture(run, pool=options.pop("pool", None) or backend.new_pool(), **options)


def test_a_replay_computes_from_the_static_buffer_into_the_same_output() -> None:
    x, model = torch.zeros(2, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    graph = capture(lambda: model(x))
    address = graph.outputs.data_ptr()
    for seed in (1, 2):
        x.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(graph.outputs, model(x), rtol=0, atol=0)
        assert graph.outputs.data_ptr() == address


def test_python_runs_only_at_capture() -> None:
    x, calls = torch.zeros(1), []

    def run() -> Tensor:
        calls.append(1)
        return x + len(calls)

    graph = capture(run)
    x.fill_(10)
    graph.replay()
    graph.replay()
    assert calls == [1]
    assert graph.outputs.item() == 11


def test_a_python_branch_is_frozen() -> None:
    x, flags = torch.ones(1), {"double": True}
    graph = capture(lambda: x * 2 if flags["double"] else x * 3)
    flags["double"] = False
    graph.replay()
    assert graph.outputs.item() == 2


def test_capture_itself_changes_nothing() -> None:
    cache, before = torch.zeros(4), torch.get_rng_state()
    graph = capture(lambda: cache.add_(1) + torch.rand(4))
    assert cache.tolist() == [0, 0, 0, 0]
    assert torch.equal(torch.get_rng_state(), before)
    assert graph.outputs.isnan().all(), "outputs mean nothing before the first replay"
    graph.replay()
    assert cache.tolist() == [1, 1, 1, 1]


def test_writes_through_views_and_indices_are_replayed() -> None:
    pool, slots, values = torch.zeros(6, 2), torch.tensor([1, 4]), torch.ones(2, 2)

    def run() -> Tensor:
        pool.view(3, 2, 2)[0, 0] = 7
        pool.index_copy_(0, slots, values)
        return pool.sum(dim=1)

    graph = capture(run)
    slots.copy_(torch.tensor([2, 5]))
    values.fill_(3)
    graph.replay()
    assert graph.outputs.tolist() == [14, 0, 6, 0, 0, 6]


def test_every_replay_draws_new_random_numbers() -> None:
    graph = capture(lambda: torch.rand(8))
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(first, graph.outputs)


def test_an_unregistered_generator_is_refused_in_torchs_words() -> None:
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match="not in capture mode"):
        capture(lambda: torch.rand(2, generator=generator))
    graph = capture(lambda: torch.rand(2, generator=generator), generators=(generator,))
    graph.replay()
    expected = torch.rand(2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(graph.outputs, expected), "a replay draws as an eager run from the same state does"


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
        lambda x: str(x),
        lambda x: x.clone().resize_(100),
        lambda x: torch.tensor([1.0], device="cpu"),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_what_cuda_refuses_is_refused(run: Callable[[Tensor], Any], inference: bool) -> None:
    x = torch.ones(3)
    with (
        torch.inference_mode(inference),
        pytest.raises(torch.AcceleratorError, match="operation not permitted when stream is capturing"),
    ):
        capture(lambda: run(x))


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_what_cuda_allows_is_allowed(inference: bool) -> None:
    x, index, mask = torch.arange(4.0), torch.tensor([2, 0]), torch.tensor([True, False, True, False])

    def run() -> Tensor:
        y = x.clone()
        y[mask] = 0.0
        heads = y.view(1, 1, 2, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return y[index] + torch.where(mask, x, 0)[:2] + attended.mT.reshape(4)[:2] + torch.topk(x, 2).values

    with torch.inference_mode(inference):
        graph = capture(run)
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(graph.outputs, run())


def test_a_replay_overwrites_the_outputs_of_the_pools_other_graphs() -> None:
    backend, x = FakeCapture(), torch.ones(2)
    pool = backend.new_pool()
    first, second = capture(lambda: x + 1, backend, pool=pool), capture(lambda: x + 2, backend, pool=pool)
    first.replay()
    second.replay()
    assert first.outputs.isnan().all()
    assert second.outputs.tolist() == [3, 3]


def test_kept_outputs_survive_graphs_captured_later_but_not_earlier() -> None:
    backend, x = FakeCapture(), torch.ones(1)
    pool = backend.new_pool()
    first = capture(lambda: x + 1, backend, pool=pool, keep_outputs=True)
    second = capture(lambda: x + 2, backend, pool=pool, keep_outputs=True)
    first.replay()
    second.replay()
    assert first.outputs.item() == 2
    first.replay()
    assert second.outputs.isnan().all()


def test_private_pools_do_not_disturb_each_other() -> None:
    backend, x = FakeCapture(), torch.ones(1)
    first, second = capture(lambda: x + 1, backend), capture(lambda: x + 2, backend)
    first.replay()
    second.replay()
    assert first.outputs.item() == 2


def test_a_shared_pool_is_as_large_as_its_largest_graph() -> None:
    backend, x = FakeCapture(), torch.ones(256)
    pool = backend.new_pool()
    capture(lambda: x + 1, backend, pool=pool)
    capture(lambda: x[:64] + 1, backend, pool=pool)
    assert backend.memory().reserved_bytes == 1024
    capture(lambda: x + 1, backend)
    assert backend.memory().reserved_bytes == 2048


def test_a_capture_over_the_capacity_is_out_of_memory_and_leaves_nothing() -> None:
    backend, x = FakeCapture(capacity_bytes=1500), torch.ones(256)
    pool = backend.new_pool()
    capture(lambda: x + 1, backend, pool=pool)
    with pytest.raises(torch.OutOfMemoryError, match="emulated"):
        capture(lambda: (x + 1) * 2, backend, pool=pool)
    assert backend.memory().free_bytes == 1500 - 1024


def test_inference_mode_regions_replay_outside_of_it() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        graph = capture(lambda: (x * 2, x.add_(1)))
    graph.replay()
    assert [output.tolist() for output in graph.outputs] == [[2, 2], [2, 2]]
