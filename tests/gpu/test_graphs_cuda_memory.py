"""What becomes of captures when memory is short."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.fakes.capture_attempts import Switch, assert_the_process_is_well, attempt
from worker.graphs.cuda_backend import CudaCapture
from worker.graphs.dispatcher import Dispatcher
from worker.graphs.errors import CaptureOutOfMemory
from worker.graphs.key import GraphKey
from worker.graphs.plan import enumerate_keys, plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import SelfCheck
from worker.graphs.session import CaptureSession

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def x() -> Tensor:
    return torch.arange(1.0, 5.0, device="cuda")


@pytest.fixture
def recorder() -> Iterator[GraphRecorder]:
    made = GraphRecorder(GraphPool(CudaCapture()))
    yield made
    made.pool.close()


@pytest.fixture
def little_memory() -> Iterator[int]:
    """About 1 GiB for this process, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = 1 << 30
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((limit + torch.cuda.memory_reserved()) / total)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_capture_out_of_memory_is_explained_and_survived(
    recorder: GraphRecorder, x: Tensor, little_memory: int
) -> None:
    huge = Switch(warm=lambda: x, capture=lambda: torch.empty(2 * little_memory, dtype=torch.uint8, device="cuda"))
    with pytest.raises(CaptureOutOfMemory):
        attempt(recorder, huge)
    assert_the_process_is_well(recorder, x)


def test_a_session_drops_the_buckets_that_do_not_fit(little_memory: int) -> None:
    row_bytes, dispatcher = little_memory // 16, Dispatcher()

    def region_of(key: GraphKey) -> CaptureRegion:
        x = torch.zeros(key.bucket, 1, device="cuda")
        return CaptureRegion(run=lambda: (x.expand(-1, row_bytes // 4) + 1).sum(dim=1), inputs={"x": x})

    plan = plan_captures(enumerate_keys(tiers=(1,), decode_buckets=(1, 2, 4, 8, 16, 32)))
    session = CaptureSession(
        plan, region_of, pool=GraphPool(CudaCapture()), dispatcher=dispatcher, self_check=SelfCheck()
    )
    session.run()
    captured = sorted(key.bucket for key in session.graphs)
    assert captured[:3] == [1, 2, 4]
    assert 32 not in captured
    assert {key.bucket for key in dispatcher.dropped} == {1, 2, 4, 8, 16, 32} - set(captured)
    assert session.graphs[GraphKey("decode", 1, 4)].replay().clone().shape == (4,)
    session.close()


def test_a_cap_is_kept() -> None:
    x = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    with contextlib.closing(GraphPool(CudaCapture(), max_bytes=32 << 20)) as pool:
        capped = GraphRecorder(pool)
        with pytest.raises(CaptureOutOfMemory, match="cap is"):
            attempt(capped, lambda: x + 1)
        before = torch.cuda.memory_reserved()
        assert pool.used_bytes == 0
        small = attempt(capped, lambda: x[:1000] + 1, "small")
        assert small.replay().clone().unique().tolist() == [1]
        assert torch.cuda.memory_reserved() - before <= 32 << 20
