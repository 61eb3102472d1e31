"""Copies, replays and read-backs are ordered by events, and the host waits for nothing on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.graphs.captured import CapturedGraph
from worker.graphs.cuda_backend import CudaCapture
from worker.graphs.errors import OutputOverwritten
from worker.graphs.key import GraphKey
from worker.graphs.lanes import CopyMode, InputLane
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.pool import GraphPool
from worker.graphs.readback import HostReadback
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion
from worker.graphs.sync_counter import SyncCounter, SyncKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPIN = 100_000_000
"""Clock cycles: about 50 ms, much longer than the host needs to queue everything behind it."""
SIZE = 1 << 16


@pytest.fixture
def graph() -> Iterator[CapturedGraph]:
    x = torch.zeros(SIZE, device="cuda")
    recorder = GraphRecorder(GraphPool(CudaCapture()))
    key, region = GraphKey("decode", 0, SIZE), CaptureRegion(run=lambda: x * 2 + 1, inputs={"x": x})
    recorder.warm_up(key, region)
    yield recorder.capture(key, region)
    recorder.pool.close()


def pinned(value: float) -> Tensor:
    return torch.full((SIZE,), value).pin_memory()


@pytest.mark.parametrize("mode", ["same_stream", "copy_stream"])
def test_inputs_queued_behind_a_busy_device_reach_the_right_replay(graph: CapturedGraph, mode: CopyMode) -> None:
    lane, sources = InputLane(torch.device("cuda"), mode), [pinned(float(step)) for step in range(20)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    outputs = []
    for source in sources:
        graph.load({"x": source}, lane)
        outputs.append(graph.replay().clone())
    assert not torch.cuda.current_stream().query(), "the host ran ahead of the device"
    assert [output.unique().tolist() for output in outputs] == [[2 * step + 1] for step in range(20)]


def test_a_source_made_on_the_device_is_waited_for(graph: CapturedGraph) -> None:
    lane = InputLane(torch.device("cuda"), "copy_stream")
    source = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    source.fill_(5)
    graph.load({"x": source}, lane)
    assert graph.replay().clone().unique().tolist() == [11]


def test_a_read_back_is_not_read_before_it_has_landed(graph: CapturedGraph) -> None:
    readback, sources = HostReadback(depth=3), [pinned(1.0), pinned(2.0), pinned(3.0)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    pending = []
    for source in sources:
        graph.load({"x": source})
        pending.append(readback.start(graph.replay()))
    assert not any(read.is_ready() for read in pending)
    assert [read.result().unique().tolist() for read in pending] == [[3], [5], [7]]
    assert all(read.is_ready() for read in pending)


def test_the_next_replay_waits_for_a_reader_on_another_stream(graph: CapturedGraph) -> None:
    side = torch.cuda.Stream()
    graph.load({"x": pinned(1.0)})
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
    lease = graph.replay()
    with torch.cuda.stream(side):
        copy = lease.clone()
    graph.load({"x": pinned(9.0)})
    later = graph.replay().clone()
    assert copy.cpu().unique().tolist() == [3]
    assert later.cpu().unique().tolist() == [19]


def test_a_block_on_another_stream_is_waited_for_too(graph: CapturedGraph) -> None:
    side, copies = torch.cuda.Stream(), []
    for value in (1.0, 2.0, 3.0):
        graph.load({"x": pinned(value)})
        lease = graph.replay()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN // 10)
            with lease as output:
                copies.append(output + 0)
    torch.cuda.synchronize()
    assert [copy.unique().tolist() for copy in copies] == [[3], [5], [7]]


def test_replays_from_several_streams_are_put_in_order(graph: CapturedGraph) -> None:
    outputs = []
    for value in range(6):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN // 20)
            stream.wait_stream(torch.cuda.default_stream())
            lease = graph.replay()
            outputs.append(lease.clone())
        torch.cuda.default_stream().wait_stream(stream)
        graph.load({"x": pinned(float(value))})
    torch.cuda.synchronize()
    assert [output.unique().tolist() for output in outputs] == [[1], [1], [3], [5], [7], [9]]


def test_an_output_cannot_be_read_after_its_time(graph: CapturedGraph) -> None:
    with graph.replay() as output:
        with pytest.raises(OutputOverwritten):
            graph.replay()
        computed = output + 1
    with pytest.raises(OutputOverwritten):
        output.cpu()
    assert computed.unique().tolist() == [2]


@pytest.mark.parametrize("copy", ["same_stream", "copy_stream"])
def test_a_thousand_steps_wait_for_nothing_and_allocate_nothing(copy: Any) -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda().eval()
    runner, readback = CUDAGraphRunner(copy=copy), HostReadback(depth=2)
    sources = [torch.randn(4, 64).pin_memory() for _ in range(4)]
    runner.warmup(module, sources[0].cuda())
    runner.capture(module, sources[0].cuda())
    for source in sources:
        readback.start(runner.replay(source)).result()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SyncCounter() as counter:
            pending = readback.start(runner.replay(sources[0]))
            for step in range(1, 1000):
                following = readback.start(runner.replay(sources[step % 4]))
                pending.result()
                pending = following
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counter.count(SyncKind.DEVICE, SyncKind.STREAM, SyncKind.VALUE) == 0, counter.calls[:5]
    assert counter.count(SyncKind.EVENT) == 999, "one wait for one copy a step, and nothing else"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    with torch.no_grad():
        torch.testing.assert_close(pending.result(), module(sources[999 % 4].cuda()).cpu(), rtol=1e-5, atol=1e-5)


def recorded_bytes(sizes: list[int], *, use_pool: bool) -> int:
    recorder = GraphRecorder(GraphPool(CudaCapture(), use_pool=use_pool))
    x = torch.zeros(max(sizes), dtype=torch.uint8, device="cuda")
    for size in sizes:
        key, region = GraphKey("decode", 0, size), CaptureRegion(run=lambda size=size: x[:size] + 1, inputs={"x": x})  # type: ignore[misc]
        recorder.warm_up(key, region)
        recorder.capture(key, region)
    used = recorder.pool.used_bytes
    recorder.pool.close()
    return used


def test_a_shared_pool_needs_the_memory_of_its_largest_graph() -> None:
    sizes = [size << 20 for size in (256, 128, 64, 32)]
    shared, private = recorded_bytes(sizes, use_pool=True), recorded_bytes(sizes, use_pool=False)
    assert shared < (256 + 96) << 20
    assert private > (256 + 128 + 64 + 32 - 32) << 20


def test_a_closed_pool_returns_its_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    recorded_bytes([256 << 20], use_pool=True)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)
