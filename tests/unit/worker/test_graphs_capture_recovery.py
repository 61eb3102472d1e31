"""After any failed capture, on any torch, the pool's counts are right: the cache can be emptied and graphs captured."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fakes.torch_captures import Graph, TorchState
from worker.graphs import capture_recovery, cuda_backend
from worker.graphs.cuda_backend import CudaCapture
from worker.graphs.errors import HostSyncInRegion, OtherThreadCall
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion

KEYS = tuple(GraphKey("decode", 0, bucket) for bucket in (1, 2, 4))


class Stream:
    device_index = 0

    def wait_stream(self, _: Stream) -> None: ...


@pytest.fixture(params=[False, True], ids=["up to 2.13", "from 2.14"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchState:
    """torch.cuda and the driver, over counts of what they hold."""
    made = TorchState(ends_after_error=request.param)
    numbers = itertools.count(1)

    @contextlib.contextmanager
    def on(_: object) -> Iterator[None]:
        yield

    fakes: dict[str, Any] = {
        "Stream": lambda *_: Stream(),
        "stream": on,
        "device": on,
        "current_stream": lambda *_: Stream(),
        "CUDAGraph": lambda **_: Graph(made),
        "graph_pool_handle": lambda: (0, next(numbers)),
        "mem_get_info": lambda *_: (1000, 2000),
        "memory_reserved": lambda *_: 500,
        "empty_cache": made.empty_cache,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: made.device.end(pool), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: made.device.release(pool), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(cuda_backend, "driver_version", lambda: 13000)
    monkeypatch.setattr(capture_recovery, "_ABANDONED", [])

    def begin_empty(_: object) -> bool:
        made.begin_on_stream()
        return True

    def discard(_: object) -> None:
        made.is_capturing = False

    monkeypatch.setattr(capture_recovery, "_begin_empty", begin_empty)
    monkeypatch.setattr(capture_recovery, "_discard", discard)
    return made


def refused(state: TorchState) -> Callable[[], None]:
    """A region that waits for the device."""
    return state.invalidate


def invalidated_from_outside(state: TorchState) -> Callable[[], None]:
    """A region that never learns that its capture is lost."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            state.invalidate()

    return run


def broken_model(_: TorchState) -> Callable[[], None]:
    """A region with a bug; its capture is in order."""

    def run() -> None:
        raise ValueError("model")

    return run


Failing = Callable[[TorchState], Callable[[], None]]
FAILURES = pytest.mark.parametrize("failing", [refused, invalidated_from_outside, broken_model])


def assert_all_is_given_back(state: TorchState, pool: GraphPool) -> None:
    assert not state.is_capturing
    assert not state.generator_is_captured
    assert state.device.recording == state.host.recording == []
    assert state.device.users == state.host.users
    pool.close()
    assert set(state.device.users.values()) <= {0}


@FAILURES
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("num_graphs", [0, 1, 2])
def test_a_failed_capture_leaves_pool_cache_and_generators_in_order(
    state: TorchState, failing: Failing, num_graphs: int, shares: bool
) -> None:
    pool = GraphPool(CudaCapture(), use_pool=shares)
    for key in KEYS[:num_graphs]:
        pool.capture(key, lambda: None)
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError)):
            pool.capture(KEYS[2], failing(state))
        torch.cuda.empty_cache()
    pool.capture(KEYS[2], lambda: None)
    if shares and num_graphs:
        assert max(state.device.users.values()) == num_graphs + 1, "the memory of the older graphs is still shared"
    assert capture_recovery._ABANDONED == []
    assert_all_is_given_back(state, pool)


@FAILURES
@pytest.mark.parametrize("num_graphs", [0, 1])
def test_without_help_of_the_driver_the_old_graphs_and_a_new_pool_still_work(
    state: TorchState, failing: Failing, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_recovery, "_begin_empty", lambda _: False)
    pool = GraphPool(CudaCapture())
    old = [pool.capture(key, lambda: None) for key in KEYS[:num_graphs]]
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError)):
            pool.capture(KEYS[2], failing(state))
        torch.cuda.empty_cache()
    pool.capture(KEYS[2], lambda: None)
    for graph in old:
        graph.recorded.replay()
    assert not state.generator_is_captured
    assert state.device.recording == []
    pool.close()
    torch.cuda.empty_cache()
    assert set(state.device.users.values()) == {0}


@pytest.mark.parametrize("failing_allocator", ["device", "host"])
def test_a_capture_that_cannot_begin_takes_back_only_what_it_took(
    state: TorchState, failing_allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, handle = CudaCapture(), torch.cuda.graph_pool_handle()
    graph = backend.capture(lambda: None, pool=handle)

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(state, failing_allocator), "begin", fail)
        with pytest.raises(RuntimeError, match="no"):
            backend.capture(lambda: None, pool=handle)
    assert state.device.users == state.host.users == {handle: 1}
    assert state.device.recording == []
    graph.reset()
    backend.trim()


def test_a_pool_whose_graphs_are_gone_is_not_released_again(state: TorchState) -> None:
    backend, handle = CudaCapture(), torch.cuda.graph_pool_handle()
    backend.capture(lambda: None, pool=handle).reset()
    assert not backend.is_usable(handle)
    backend.trim()
    assert state.device.users[handle] == 0


@pytest.mark.parametrize(
    ("failing", "expected"), [(refused, HostSyncInRegion), (invalidated_from_outside, OtherThreadCall)]
)
def test_an_error_of_cuda_keeps_its_meaning_through_the_recovery(
    state: TorchState, failing: Failing, expected: type[Exception]
) -> None:
    recorder, doing = GraphRecorder(GraphPool(CudaCapture())), [lambda: None]
    region = CaptureRegion(run=lambda: doing[-1]())
    recorder.warm_up(KEYS[0], region, check=False)
    doing.append(failing(state))
    with pytest.raises(expected):
        recorder.capture(KEYS[0], region)
    assert_all_is_given_back(state, recorder.pool)
