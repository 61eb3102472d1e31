from __future__ import annotations

import torch

from tests.unit.worker.test_graph_memory import LLAMA_1B
from worker.capture_forecast import CaptureForecast, forecast_captures
from worker.graph_memory import EXECUTABLE_BYTES, StepMemory
from worker.graph_runner import worker_keys
from worker.graphs.key import GraphKey
from worker.tiers import BucketTable, TierTable, default_buckets

MIB, GIB = 1 << 20, 1 << 30
MEMORY = StepMemory(LLAMA_1B, torch.bfloat16)
KEYS = worker_keys(TierTable((512, 1024, 2048, 4096), 16), BucketTable(default_buckets(32)), BucketTable((1, 64, 1024)))


def forecast(free: int = 60 * GIB, **options: object) -> CaptureForecast:
    return forecast_captures(KEYS, MEMORY, free_bytes=free, **options)  # type: ignore[arg-type]


def fitting(found: CaptureForecast) -> set[GraphKey]:
    return {line.key for line in found.lines if line.fits}


def test_with_memory_to_spare_every_key_fits_in_the_order_of_capture() -> None:
    found = forecast()
    assert fitting(found) == set(KEYS)
    assert [line.order for line in found.lines] == list(range(1, len(KEYS) + 1))
    assert found.lines[0].key == GraphKey("decode", 4096, 32)


def test_a_shared_pool_is_about_as_large_as_its_largest_graph() -> None:
    found = forecast()
    largest = max(line.alone_bytes for line in found.lines)
    assert largest <= found.pool_bytes <= 1.1 * largest
    assert found.total_bytes == found.pool_bytes + len(KEYS) * EXECUTABLE_BYTES


def test_what_the_lines_add_is_the_whole() -> None:
    found = forecast()
    assert abs(sum(line.added_bytes for line in found.lines) - found.total_bytes) <= 2 * MIB


def test_pools_of_their_own_take_the_sum() -> None:
    found = forecast(use_pool=False)
    assert found.pool_bytes == sum(line.alone_bytes for line in found.lines)


def test_a_cap_drops_the_largest_keys_and_names_it() -> None:
    found = forecast(max_bytes=200 * MIB)
    lost = [line for line in found.lines if not line.fits]
    assert {GraphKey("decode", 4096, 32), GraphKey("sample", 0, 32, "any")} <= {line.key for line in lost}
    assert {line.key.bucket for line in lost} == {32}
    assert "cap" in lost[0].reason
    assert found.total_bytes <= 200 * MIB


def test_little_memory_keeps_the_small_keys() -> None:
    found = forecast(free=120 * MIB)
    assert GraphKey("decode", 512, 1) in fitting(found)
    assert GraphKey("decode", 4096, 32) not in fitting(found)
    assert "MiB are needed" in next(line.reason for line in found.lines if not line.fits)
    assert found.total_bytes <= 120 * MIB


def test_keys_past_the_limit_of_a_plan_are_listed_with_the_reason() -> None:
    keys = [GraphKey("decode", tier, bucket) for tier in (64, 128, 256) for bucket in range(1, 32)]
    found = forecast_captures(keys, MEMORY, free_bytes=60 * GIB)
    surplus = [line for line in found.lines if line.order is None]
    assert len(found.lines) == 93
    assert len(surplus) == 5
    assert all("88 keys" in line.reason for line in surplus)


def test_nothing_fits_where_there_is_no_memory() -> None:
    found = forecast(free=0)
    assert not fitting(found)
    assert found.total_bytes == 0
