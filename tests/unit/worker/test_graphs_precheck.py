from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.graphs.errors import (
    AllocatorInRegion,
    CaptureError,
    ControlFlowOnValues,
    DataDependentShape,
    HostSyncInRegion,
    OptimizerInRegion,
    StaleState,
    UnregisteredRandomness,
)
from worker.graphs.precheck import Precheck, precheck_region
from worker.graphs.region import CaptureRegion, storage_of


def check(run: Callable[[], Any], **options: Any) -> Precheck:
    return precheck_region(CaptureRegion(run=run, **options), "decode/t0/b1/test")


def findings(run: Callable[[], Any], **options: Any) -> list[type[CaptureError]]:
    return [type(finding) for finding in check(run, **options).findings]


X = torch.arange(1.0, 5.0)


@pytest.mark.parametrize(
    ("run", "expected", "call"),
    [
        (lambda: X.sum().item(), HostSyncInRegion, "Tensor.item"),
        (lambda: X.tolist(), HostSyncInRegion, "Tensor.tolist"),
        (lambda: X.cpu(), HostSyncInRegion, "Tensor.cpu"),
        (lambda: X.to("cpu"), HostSyncInRegion, 'Tensor.to("cpu")'),
        (lambda: X.numpy(), HostSyncInRegion, "Tensor.numpy"),
        (lambda: float(X.sum()), HostSyncInRegion, "__float__"),
        (lambda: [0, 1, 2, 3, 4][X.long()[0]], HostSyncInRegion, "__index__"),
        (lambda: repr(X), HostSyncInRegion, "__repr__"),
        (lambda: f"{X}", HostSyncInRegion, "__format__"),
        (lambda: torch.equal(X, X), HostSyncInRegion, "aten.equal"),
        (lambda: torch.tensor([1.0], device="cpu"), HostSyncInRegion, "torch.tensor"),
        (lambda: X[X > 2], DataDependentShape, "aten.index.Tensor"),
        (lambda: X.nonzero(), DataDependentShape, "aten.nonzero"),
        (lambda: torch.masked_select(X, X > 2), DataDependentShape, "aten.masked_select"),
        (lambda: torch.unique(X), DataDependentShape, "unique"),
        (lambda: torch.where(X > 2), DataDependentShape, "aten.nonzero"),
        (lambda: 1 if X.sum() > 0 else 2, ControlFlowOnValues, "truth value"),
        (lambda: 2.0 in X, ControlFlowOnValues, "truth value"),
        (lambda: torch.rand(3), UnregisteredRandomness, "aten.rand"),
        (lambda: functional.dropout(X, 0.5, training=True), UnregisteredRandomness, "draws random numbers"),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_a_trap_is_found_with_operator_and_line(
    run: Callable[[], Any], expected: type, call: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        (found,) = check(run).findings
    assert type(found) is expected
    assert call in found.detail
    assert "test_graphs_precheck.py" in found.where
    assert found.key == "decode/t0/b1/test"


def test_the_line_is_that_of_the_layer_when_the_model_is_all_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    (found,) = check(lambda: model(X)).findings
    assert "test_graphs_precheck.py" in found.where
    assert "aten.bernoulli_" in found.detail


@pytest.mark.parametrize(
    "run",
    [
        lambda: functional.dropout(X, 0.5, training=False),
        lambda: functional.scaled_dot_product_attention(X.view(1, 1, 2, 2), X.view(1, 1, 2, 2), X.view(1, 1, 2, 2)),
        lambda: X[torch.tensor([1, 2])],
        lambda: X.clone().masked_fill_(X > 2, 0),
        lambda: X.clone().index_put_((X > 2,), torch.tensor(0.0)),
        lambda: torch.where(X > 2, X, 0),
        lambda: X.to(torch.float16),
        lambda: X * torch.tensor(2.0),
        lambda: torch.empty(0).resize_(3),
        lambda: X.topk(2),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_capturable_code_has_no_findings(run: Callable[[], Any], inference: bool) -> None:
    with torch.inference_mode(inference):
        assert findings(run) == []


def test_all_findings_of_a_run_are_collected_once() -> None:
    def run() -> None:
        for _ in range(3):
            X.sum().item()
        torch.rand(1)

    assert findings(run) == [HostSyncInRegion, UnregisteredRandomness]
    with pytest.raises(HostSyncInRegion):
        check(run).raise_first()


def test_a_named_generator_makes_randomness_legitimate() -> None:
    generator, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    assert findings(lambda: torch.rand(2, generator=generator), generators=(generator,)) == []
    assert findings(lambda: torch.rand(2, generator=other), generators=(generator,)) == [UnregisteredRandomness]
    assert findings(lambda: torch.rand(2), generators=(torch.default_generator,)) == []


def test_a_write_to_undeclared_memory_is_stale_state() -> None:
    cache = torch.zeros(4)

    def run() -> Tensor:
        cache[1:3].add_(1)
        return cache * 2

    (found,) = check(run).findings
    assert isinstance(found, StaleState)
    assert "reset" in found.remedy
    assert findings(run, state={"cache": cache}) == []
    assert findings(run, scratch={"cache": cache}) == []
    assert findings(run, inputs={"cache": cache}) == []
    assert findings(run, reset=cache.zero_) == []


def test_memory_created_in_the_region_may_be_written() -> None:
    assert findings(lambda: torch.zeros(3).add_(X[:3]).mul_(2)) == []


def test_everything_read_from_outside_is_listed_once_a_memory() -> None:
    weight, bias = torch.ones(4, 4), torch.zeros(4)
    report = check(lambda: functional.linear(X, weight, bias) + weight[0])
    assert {storage_of(tensor) for tensor in report.reads} == {storage_of(t) for t in (X, weight, bias)}
    assert report.num_operators >= 2


def test_growing_an_old_tensor_is_found() -> None:
    buffer = torch.zeros(2)
    assert AllocatorInRegion in findings(lambda: buffer.resize_(100), scratch={"buffer": buffer})


def test_pinned_allocation_is_found_even_where_it_fails() -> None:
    with pytest.raises(RuntimeError):
        check(lambda: X.pin_memory())


def test_device_and_stream_waits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert findings(lambda: torch.cuda.synchronize()) == [HostSyncInRegion]
    assert findings(lambda: torch.cuda.empty_cache()) == [AllocatorInRegion]


def test_waits_of_other_threads_are_not_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def run() -> None:
        thread = threading.Thread(target=lambda: torch.cuda.synchronize())
        thread.start()
        thread.join()

    assert findings(run) == []


def test_an_optimizer_that_is_not_capturable_is_found() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)

    def step(optimizer: torch.optim.Optimizer) -> list[type[CaptureError]]:
        return findings(lambda: optimizer.step(), reset=lambda: None)

    assert OptimizerInRegion in step(torch.optim.AdamW([weight], lr=0.1))
    assert OptimizerInRegion not in step(torch.optim.SGD([weight], lr=0.1))


def test_an_autocast_cache_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(AllocatorInRegion, match="autocast"):
        check(lambda: X + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert findings(lambda: X + 1) == []
