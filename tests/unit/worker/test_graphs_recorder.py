from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.graphs import recorder as recorder_module
from worker.graphs.compile_watch import CompileWatch
from worker.graphs.errors import (
    CaptureOutOfMemory,
    FirstUseInRegion,
    HostSyncInRegion,
    MissingWarmUp,
    StaleState,
    UnregisteredRandomness,
)
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.gc_freeze import frozen_gc
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion, module_tables

KEY = GraphKey("decode", 256, 4)


def recorder(**options: Any) -> GraphRecorder:
    return GraphRecorder(GraphPool(FakeCapture(), **options))


def counting_region(calls: list[int]) -> CaptureRegion:
    x = torch.zeros(4)

    def run() -> Tensor:
        calls.append(1)
        return x + 1

    return CaptureRegion(run=run, inputs={"x": x})


def test_capture_without_warm_up_is_refused() -> None:
    with pytest.raises(MissingWarmUp, match="decode/t256/b4"):
        recorder().capture(KEY, counting_region([]))


def test_a_forgotten_key_must_be_warmed_up_again() -> None:
    made, region = recorder(), counting_region([])
    made.warm_up(KEY, region)
    made.forget(KEY)
    with pytest.raises(MissingWarmUp):
        made.capture(KEY, region)


def test_warm_up_runs_as_often_as_asked_and_at_least_once() -> None:
    made = recorder()
    calls: list[int] = []
    made.warm_up(KEY, counting_region(calls))
    assert len(calls) == 3
    made.warm_up(KEY, counting_region(calls), num_steps=10, check=False)
    assert len(calls) == 13
    made.warm_up(KEY, counting_region(calls), num_steps=1, check=False)
    assert len(calls) == 14
    with pytest.raises(ValueError, match="at least 1"):
        made.warm_up(KEY, counting_region(calls), num_steps=0)


def test_warm_up_leaves_state_as_it_was() -> None:
    cache, resets = torch.arange(4.0), []

    def run() -> Tensor:
        return cache.add_(1)

    recorder().warm_up(KEY, CaptureRegion(run=run, state={"cache": cache}))
    assert cache.tolist() == [0, 1, 2, 3]
    recorder().warm_up(KEY, CaptureRegion(run=run, reset=lambda: resets.append(1)))
    assert resets == [1]
    with pytest.raises(StaleState):
        recorder().warm_up(KEY, CaptureRegion(run=run))


def test_warm_up_goes_on_until_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Settling(CompileWatch):
        @property
        def builds(self) -> int:
            return int(len(calls) < 6)

    monkeypatch.setattr(recorder_module, "CompileWatch", Settling)
    recorder().warm_up(KEY, counting_region(calls))
    assert len(calls) == 6


def test_a_region_that_compiles_for_ever_or_at_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, region = recorder(), counting_region([])
    made.warm_up(KEY, region)

    class Busy(CompileWatch):
        builds = 1

    monkeypatch.setattr(recorder_module, "CompileWatch", Busy)
    with pytest.raises(FirstUseInRegion, match="during capture"):
        made.capture(KEY, region)
    assert made.pool.used_bytes == 0
    with pytest.raises(FirstUseInRegion, match="still compiling"):
        made.warm_up(KEY, region)


def test_a_compilation_by_torch_compile_is_counted() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with CompileWatch() as watch:
        compiled(torch.ones(2))
    assert watch.builds >= 1
    with CompileWatch() as watch:
        compiled(torch.ones(2))
    assert watch.builds == 0


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: torch.ones(2).sum().item(), HostSyncInRegion),
        (lambda: torch.rand(2, generator=torch.Generator()), UnregisteredRandomness),
    ],
)
def test_a_trap_ends_the_warm_up_and_without_the_check_the_capture(run: Callable[[], Any], expected: type) -> None:
    made, region = recorder(), CaptureRegion(run=run)
    with pytest.raises(expected):
        made.warm_up(KEY, region)
    made.warm_up(KEY, region, check=False)
    with pytest.raises(expected) as caught:
        made.capture(KEY, region)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_the_model_passes_through() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        recorder().warm_up(KEY, CaptureRegion(run=lambda: torch.ones(2, 3) @ torch.ones(2, 3)))


def test_the_cost_of_a_capture_is_reported() -> None:
    made, x = recorder(), torch.zeros(256)
    region = CaptureRegion(run=lambda: x + 1, inputs={"x": x})
    made.warm_up(KEY, region)
    cost = made.capture(KEY, region).cost
    assert cost.num_bytes == cost.pool_bytes == 1024
    assert cost.num_nodes == 1
    assert cost.capture_s >= cost.instantiate_s >= 0


def captured_sizes(made: GraphRecorder, *sizes: int) -> None:
    for size in sizes:
        x, key = torch.zeros(size), GraphKey("decode", 0, size)
        region = CaptureRegion(run=functools.partial(torch.add, x, 1), inputs={"x": x})
        made.warm_up(key, region)
        made.capture(key, region)


def test_a_shared_pool_charges_only_growth_and_private_pools_everything() -> None:
    shared, private = recorder(), recorder(use_pool=False)
    captured_sizes(shared, 256, 64)
    captured_sizes(private, 256, 64)
    assert shared.pool.used_bytes == 1024
    assert private.pool.used_bytes == 1280
    assert list(shared.pool.bytes_by_key.values()) == [1024, 0]


def test_the_cap_is_checked_after_each_capture_and_the_pool_goes_on() -> None:
    made = recorder(max_bytes=1000)
    with pytest.raises(CaptureOutOfMemory, match="cap is 1000"):
        captured_sizes(made, 512)
    captured_sizes(made, 128, 64)
    assert [key.bucket for key in made.pool.bytes_by_key] == [128, 64]


def test_memory_that_other_graphs_hold_stays_on_the_account() -> None:
    made = recorder(max_bytes=1000)
    captured_sizes(made, 128)
    with pytest.raises(CaptureOutOfMemory):
        captured_sizes(made, 512)
    assert made.pool.used_bytes == 2048
    assert made.pool.is_over_cap
    made.pool.close()
    assert made.pool.used_bytes == 0


def test_a_cap_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        recorder(max_bytes=0)


def test_a_closed_pool_can_be_captured_into_again() -> None:
    made = recorder()
    captured_sizes(made, 128)
    made.pool.close()
    assert made.pool.used_bytes == 0
    captured_sizes(made, 128)
    assert made.pool.used_bytes == 512


def test_a_key_is_captured_once() -> None:
    made = recorder()
    captured_sizes(made, 8)
    with pytest.raises(ValueError, match="already"):
        captured_sizes(made, 8)


def test_the_garbage_collector_is_frozen_and_thawed() -> None:
    gc.unfreeze()
    with frozen_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_freeze_of_the_application_stays_in_force() -> None:
    gc.freeze()
    try:
        with frozen_gc(collect=False):
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_between_two_captures_the_collector_is_off_without_a_count_of_what_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counts"))
    with frozen_gc(collect=False):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_other_threads_build_meanwhile_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    compilation = SimpleNamespace(listener=lambda **_: heard.append(threading.current_thread().name))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=compilation)))
    with CompileWatch() as watch:
        other = threading.Thread(target=lambda: compilation.listener(), name="other")
        other.start()
        other.join()
        assert watch.builds == 0
        compilation.listener()
        assert watch.builds == 1
    assert heard == ["other", threading.current_thread().name]


def test_module_tables_name_every_weight() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    names = {f"{prefix}{name}" for prefix, table in module_tables(model) for name in table}
    assert names == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
