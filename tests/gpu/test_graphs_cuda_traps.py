"""What CUDA itself does at each trap, and that a failed capture leaves the process able to go on."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes.capture_attempts import Switch, assert_the_process_is_well, attempt
from worker.graphs import capture_recovery
from worker.graphs.cuda_backend import CudaCapture
from worker.graphs.errors import (
    AllocatorInRegion,
    CaptureError,
    ControlFlowOnValues,
    DataDependentShape,
    FirstUseInRegion,
    GraphError,
    HostSyncInRegion,
    OtherThreadCall,
    UnjoinedStream,
    UnregisteredRandomness,
)
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.precheck import precheck_region
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import SelfCheck

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit  # type: ignore[untyped-decorator]
    def add_one(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803 - Triton's convention
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@pytest.fixture
def x() -> Tensor:
    return torch.arange(1.0, 5.0, device="cuda")


@pytest.fixture
def recorder() -> Iterator[GraphRecorder]:
    made = GraphRecorder(GraphPool(CudaCapture()))
    yield made
    made.pool.close()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.sum().item(), HostSyncInRegion),
        (lambda x: x.cpu(), HostSyncInRegion),
        (lambda x: torch.tensor([1.0, 2.0], device="cuda") + x[:2], HostSyncInRegion),
        (lambda x: x + 1 if x.sum() > 0 else x, ControlFlowOnValues),
        (lambda x: x[x > 2], HostSyncInRegion),
        (lambda x: x.nonzero(), HostSyncInRegion),
        (lambda x: torch.cuda.current_stream().synchronize(), HostSyncInRegion),
        (lambda x: torch.cuda.synchronize(), HostSyncInRegion),
    ],
)
def test_a_wait_of_the_host_is_refused_by_cuda_explained_and_survived(
    recorder: GraphRecorder, x: Tensor, run: Callable[[Tensor], Any], expected: type[CaptureError]
) -> None:
    old = attempt(recorder, lambda: x * 3, "old")
    with pytest.raises(expected) as caught:
        attempt(recorder, lambda: run(x))
    assert "test_graphs_cuda_traps.py" in caught.value.where
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert old.replay().clone().tolist() == [3, 6, 9, 12]
    assert_the_process_is_well(recorder, x)


def wait_for(x: Tensor) -> float:
    return float(x.sum().item())


@pytest.mark.parametrize("num_older", [0, 2])
@pytest.mark.parametrize("use_pool", [True, False])
def test_many_failed_captures_cost_no_memory_and_no_pool(x: Tensor, use_pool: bool, num_older: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    reserved, abandoned = torch.cuda.memory_reserved(), len(capture_recovery._ABANDONED)
    recorder = GraphRecorder(GraphPool(CudaCapture(), use_pool=use_pool))
    older = [attempt(recorder, lambda: x + 1, f"older {number}") for number in range(num_older)]
    handle = recorder.pool._handle
    for _ in range(20):
        with pytest.raises(HostSyncInRegion) as caught:
            attempt(recorder, lambda: wait_for(x.expand(1 << 20, 4) + 1))
        del caught
        gc.collect()  # the frames of the error hold the region's memory
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20
    assert len(capture_recovery._ABANDONED) == abandoned, "torch was brought to end every one of them itself"
    if num_older:
        assert recorder.pool._handle == handle, "later graphs share memory with the older ones"
    for graph in older:
        assert graph.replay().clone().tolist() == [2, 3, 4, 5]
    assert_the_process_is_well(recorder, x)
    recorder.pool.close()
    assert torch.cuda.memory_reserved() - reserved <= 8 << 20


def test_without_help_of_the_driver_a_failed_capture_is_survived_too(
    recorder: GraphRecorder, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_recovery, "_begin_empty", lambda _: False)
    generator = torch.Generator("cuda").manual_seed(1)
    old = attempt(recorder, lambda: x * 3, "old")
    for _ in range(3):
        with pytest.raises(HostSyncInRegion):
            attempt(recorder, lambda: wait_for(x), generators=(generator,))
        torch.cuda.empty_cache()
        assert torch.rand(8, device="cuda", generator=generator).std() > 0
    assert old.replay().clone().tolist() == [3, 6, 9, 12]
    assert_the_process_is_well(recorder, x)


def test_a_graph_keeps_the_workspace_of_its_matrix_products_when_others_go(recorder: GraphRecorder) -> None:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((8, 8192), (8192, 64)))
    expected = a @ b
    kept = attempt(recorder, lambda: a @ b, "kept")
    for number in range(3):
        recorder.release(attempt(recorder, lambda: a @ b, f"gone {number}"))
        with pytest.raises(HostSyncInRegion):
            attempt(recorder, lambda: wait_for(a @ b), f"failed {number}")
        torch.cuda.empty_cache()
        with torch.cuda.stream(recorder.pool.backend.stream):  # type: ignore[attr-defined]
            others = [torch.zeros(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        assert torch.allclose(kept.replay().clone().float(), expected.float(), rtol=2e-2, atol=2e-1)
        torch.cuda.synchronize()
        assert not any(other.any() for other in others), "the graph wrote into memory that is someone else's now"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.cpu(), HostSyncInRegion),
        (lambda x: x.to("cpu"), HostSyncInRegion),
        (lambda x: torch.ones(2).to("cuda"), HostSyncInRegion),
        (lambda x: torch.ones(2).pin_memory(), AllocatorInRegion),
        (lambda x: x.copy_(torch.ones(4)), HostSyncInRegion),
        (lambda x: x[x > 2], DataDependentShape),
        (lambda x: torch.cuda.synchronize(), HostSyncInRegion),
        (lambda x: torch.cuda.empty_cache(), AllocatorInRegion),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), UnregisteredRandomness),
    ],
)
def test_the_pre_check_finds_it_before_cuda_does(x: Tensor, run: Callable[[Tensor], Any], expected: type) -> None:
    report = precheck_region(CaptureRegion(run=lambda: run(x), inputs={"x": x}))
    assert expected in {type(finding) for finding in report.findings}


def test_a_pinned_copy_without_waiting_is_legitimate(recorder: GraphRecorder, x: Tensor) -> None:
    host = torch.ones(4).pin_memory()
    region = CaptureRegion(run=lambda: x + host.to("cuda", non_blocking=True), inputs={"x": x})
    assert precheck_region(region).findings == ()
    graph = attempt(recorder, region.run)
    host.fill_(10)
    assert graph.replay().clone().tolist() == [11, 12, 13, 14], "the copy is a node of the graph"


def test_an_unregistered_generator_is_refused_or_advanced(recorder: GraphRecorder, x: Tensor) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    try:
        graph = attempt(recorder, lambda: torch.rand(4, device="cuda", generator=generator))
    except UnregisteredRandomness:
        pass  # torch 2.11
    else:
        assert not torch.equal(graph.replay().clone(), graph.replay().clone())
    assert_the_process_is_well(recorder, x)


def test_a_registered_generator_draws_what_eager_draws(recorder: GraphRecorder) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    graph = attempt(recorder, lambda: torch.rand(1000, device="cuda", generator=generator), generators=(generator,))
    for seed in (7, 8, 7):
        generator.manual_seed(seed)
        twin = torch.Generator("cuda").manual_seed(seed)
        drawn = [graph.replay().clone() for _ in range(3)]
        assert not torch.equal(drawn[0], drawn[1])
        for numbers in drawn:
            assert torch.equal(numbers, torch.rand(1000, device="cuda", generator=twin))


def test_dropout_stays_random_over_replays(recorder: GraphRecorder) -> None:
    ones = torch.ones(4096, device="cuda")
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    key = GraphKey("decode", 0, 1, "dropout")
    region = CaptureRegion(run=lambda: nn.functional.dropout(ones, 0.5, training=True), generators=(default,))
    recorder.warm_up(key, region)
    graph = recorder.capture(key, region)
    masks = [graph.replay().clone() for _ in range(4)]
    assert len({tuple(mask[:64].tolist()) for mask in masks}) == 4
    assert all(abs(float(mask.mean()) - 1) < 0.1 for mask in masks)


def test_the_self_check_covers_random_regions(recorder: GraphRecorder, x: Tensor) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    graph = attempt(
        recorder,
        lambda: x + torch.rand(4, device="cuda", generator=generator),
        inputs={"x": x},
        generators=(generator,),
    )
    assert SelfCheck(num_rounds=3).check(graph).is_equal


def call_from_another_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0] if results else None


def test_another_threads_copies_and_allocations_do_not_disturb_a_capture(recorder: GraphRecorder, x: Tensor) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def busy() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    host = torch.randn(100_000).pin_memory()
                    device = host.to("cuda", non_blocking=True)
                    (device * 2).to("cpu")
                    stream.synchronize()
                    torch.cuda.mem_get_info()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        graphs = [attempt(recorder, lambda: torch.relu(x) + 1, f"busy {number}") for number in range(50)]
    finally:
        stop.set()
        thread.join()
    assert not errors
    for graph in graphs:
        assert graph.replay().clone().tolist() == [2, 3, 4, 5]


def test_the_error_mode_decides_whether_another_threads_allocation_ends_a_capture(
    recorder: GraphRecorder, x: Tensor
) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    allocated: list[Any] = []

    def region() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            status, address = call_from_another_thread(lambda: runtime.cudaMalloc(1 << 20))
            if int(status) == 0:
                allocated.append(address)
        return x + 1

    assert attempt(recorder, region).replay().clone().tolist() == [2, 3, 4, 5]
    with contextlib.closing(GraphPool(CudaCapture(error_mode="global"))) as pool:
        strict = GraphRecorder(pool)
        with pytest.raises(OtherThreadCall):
            attempt(strict, region)
        assert_the_process_is_well(strict, x)
    for address in allocated:
        runtime.cudaFree(address)


def test_a_device_wide_wait_of_another_thread_never_leaves_half_a_graph(recorder: GraphRecorder, x: Tensor) -> None:
    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # refused while the capture runs
            torch.cuda.synchronize()

    def region() -> Tensor:
        y = x + 1
        if torch.cuda.is_current_stream_capturing():
            call_from_another_thread(wait)
        return y * 2

    try:
        graph = attempt(recorder, region)
    except GraphError:
        pass
    else:
        assert graph.replay().clone().tolist() == [4, 6, 8, 10]
    assert_the_process_is_well(recorder, x)


def test_work_left_on_another_stream_is_named(recorder: GraphRecorder, x: Tensor) -> None:
    side = torch.cuda.Stream()

    def forked(*, joins: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if joins:
                torch.cuda.current_stream().wait_stream(side)
            return y

        return run

    assert attempt(recorder, forked(joins=True), "joined").replay().clone().tolist() == [2, 3, 4, 5]
    with pytest.raises(UnjoinedStream):
        attempt(recorder, forked(joins=False))
    torch.cuda.synchronize()
    assert_the_process_is_well(recorder, x)


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_a_triton_kernel_compiled_during_capture_is_refused_and_fine_when_warm(
    recorder: GraphRecorder, x: Tensor
) -> None:
    def kernel() -> Tensor:
        y = torch.empty_like(x)
        add_one[(1,)](x, y, 4, BLOCK=64)
        return y

    with pytest.raises(FirstUseInRegion):
        attempt(recorder, Switch(warm=lambda: x + 1, capture=kernel))
    assert attempt(recorder, kernel, "warm").replay().clone().tolist() == [2, 3, 4, 5]
    assert_the_process_is_well(recorder, x)


def test_a_compilation_by_torch_compile_during_capture_is_refused(recorder: GraphRecorder, x: Tensor) -> None:
    compiled = torch.compile(lambda y: y * 2 + 1, backend="eager")
    with pytest.raises(FirstUseInRegion):
        attempt(recorder, Switch(warm=lambda: x + 1, capture=lambda: compiled(x)))
    assert_the_process_is_well(recorder, x)
