from __future__ import annotations

import pytest
import torch
from torch import nn

from worker.graphs.errors import OutputOverwritten
from worker.graphs.lanes import InputLane
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.readback import HostReadback
from worker.graphs.sync_counter import SyncCounter, SyncKind

X = torch.arange(4.0)


def test_every_kind_of_wait_is_counted_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch.cuda, torch.accelerator, torch.cuda.Stream, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with SyncCounter() as counter:
        torch.cuda.synchronize()
        torch.accelerator.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.Stream.synchronize(None)  # type: ignore[arg-type]
        torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
        X.sum().item()
        bool(X.sum() > 0)
        X.nonzero()
    assert dict(counter.by_kind) == {SyncKind.DEVICE: 3, SyncKind.STREAM: 1, SyncKind.EVENT: 1, SyncKind.VALUE: 3}
    assert counter.count() == 8
    assert counter.count(SyncKind.DEVICE, SyncKind.STREAM) == 4
    assert all("test_graphs_sync_counter.py" in call.where for call in counter.calls)


def test_nothing_is_counted_or_patched_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", original := lambda *_: None)
    with SyncCounter() as counter:
        pass
    torch.cuda.synchronize()
    X.sum().item()
    assert counter.count() == 0
    assert torch.cuda.synchronize is original


def test_ordinary_work_waits_for_nothing() -> None:
    with SyncCounter() as counter:
        torch.where(X > 1, X, 0)[torch.tensor([0, 2])].softmax(0).to(torch.float16)
    assert counter.calls == []


def test_a_replay_with_its_copies_waits_for_nothing() -> None:
    module, readback = nn.Linear(4, 2), HostReadback()
    runner = CUDAGraphRunner()
    runner.warmup(module, X)
    runner.capture(module, X)
    with SyncCounter() as counter:
        for _ in range(5):
            with runner.replay(X) as output:
                output.argmax()
            pending = readback.start(runner.replay(X))
    assert counter.calls == []
    torch.testing.assert_close(pending.result(), module(X))


def captured() -> CUDAGraphRunner:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"double": x * 2, "name": "double"}

    module, runner = Double(), CUDAGraphRunner()
    runner.warmup(module, X)
    runner.capture(module, X)
    return runner


def test_a_read_back_outlives_the_next_replay() -> None:
    runner, readback = captured(), HostReadback(depth=2)
    first = readback.start(runner.replay(X))
    second = readback.start(runner.replay(X + 1))
    assert first.is_ready()
    assert first.result()["double"].tolist() == [0, 2, 4, 6]
    assert second.result()["double"].tolist() == [2, 4, 6, 8]
    assert second.result()["name"] == "double"


def test_a_read_back_that_is_read_too_late_raises() -> None:
    runner, readback = captured(), HostReadback(depth=1)
    first = readback.start(runner.replay(X))
    readback.start(runner.replay(X))
    with pytest.raises(OutputOverwritten, match="host copy"):
        first.result()


def test_a_read_back_needs_a_live_lease_and_one_shape() -> None:
    runner, readback = captured(), HostReadback(depth=1)
    lease = runner.replay(X)
    runner.replay(X)
    with pytest.raises(OutputOverwritten):
        readback.start(lease)
    readback.start(runner.replay(X))
    module, other = nn.Linear(4, 2), CUDAGraphRunner()
    other.warmup(module, X)
    other.capture(module, X)
    with pytest.raises(ValueError, match="this ring holds"):
        readback.start(other.replay(X))
    with pytest.raises(ValueError, match="depth"):
        HostReadback(depth=0)


def test_a_lane_copies_every_pair() -> None:
    lane = InputLane(torch.device("cpu"), "copy_stream")
    a, b = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    lane.copy([(a, torch.ones(2)), (b, torch.tensor([3, 4]))])
    assert a.tolist() == [1, 1]
    assert b.tolist() == [3, 4]


def test_a_transposed_view_of_the_buffer_is_copied_although_it_starts_at_the_same_address() -> None:
    static = torch.arange(4.0).view(2, 2)
    same_start = torch.as_strided(static, (2, 2), (1, 1))
    InputLane(torch.device("cpu")).copy([(static, same_start)])
    assert static[0].tolist() == [0, 1]
    assert static[1, 0] == 1
