from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.graphs.captured import CapturedGraph
from worker.graphs.dispatcher import Dispatcher, Miss, MissReason
from worker.graphs.errors import DeviceFault, HostSyncInRegion
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.key import GraphKey
from worker.graphs.plan import CapturePlan, enumerate_keys, plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.precheck import Precheck, precheck_region
from worker.graphs.progress import CaptureBar, CaptureProgress, CaptureStage, describe
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import CheckResult, SelfCheck
from worker.graphs.session import CaptureSession, SessionOptions
from worker.load import GraphReadiness

TIERS, BUCKETS = (64, 256), (1, 2, 4)
PLAN = plan_captures(enumerate_keys(tiers=TIERS, decode_buckets=BUCKETS))


class Regions:
    """x -> x * 2, per key; `broken` keys do something else; every run is logged."""

    def __init__(self, broken: dict[GraphKey, Callable[[Tensor], Any]] | None = None) -> None:
        self.broken = broken or {}
        self.runs: list[GraphKey] = []

    def __call__(self, key: GraphKey) -> CaptureRegion:
        x = torch.zeros(key.bucket, 64)

        def run() -> Any:
            self.runs.append(key)
            return self.broken.get(key, double)(x)

        return CaptureRegion(run=run, inputs={"x": x}, draw=lambda rng, poison: draw(x, rng, poison))


def double(x: Tensor) -> Tensor:
    return x * 2


def draw(x: Tensor, rng: torch.Generator, poison: bool) -> int:
    rows = max(1, x.shape[0] - 1)
    x.copy_(torch.rand(x.shape, generator=rng))
    x[rows:] = float("nan") if poison else 0
    return rows


def session(
    regions: Regions | None = None,
    *,
    plan: CapturePlan = PLAN,
    capacity: int | None = None,
    max_bytes: int | None = None,
    **options: Any,
) -> CaptureSession:
    names = ("num_warmup_steps", "two_pass", "precheck", "is_strict")
    session_options = {name: options.pop(name) for name in names if name in options}
    return CaptureSession(
        plan,
        regions or Regions(),
        pool=GraphPool(FakeCapture(capacity_bytes=capacity), max_bytes=max_bytes),
        dispatcher=options.pop("dispatcher", Dispatcher()),
        options=SessionOptions(**session_options),
        **options,
    )


def finish(running: CaptureSession) -> list[CaptureProgress]:
    seen = []
    while (progress := running.capture_next()) is not None:
        seen.append(progress)
    return seen


def test_every_shape_is_warmed_up_before_any_is_captured() -> None:
    seen = finish(session())
    assert [(p.stage, p.key) for p in seen] == [
        *((CaptureStage.WARMED, key) for key in PLAN.keys),
        *((CaptureStage.CAPTURED, key) for key in PLAN.keys),
    ]
    assert [p.done for p in seen] == list(range(1, 13))
    assert {p.total for p in seen} == {12}


def test_in_one_pass_each_shape_is_usable_right_after_its_warm_up() -> None:
    seen = finish(session(two_pass=False))
    assert [p.stage for p in seen[:4]] == [CaptureStage.WARMED, CaptureStage.CAPTURED] * 2
    assert seen[0].key == seen[1].key == PLAN.keys[0]


def test_readiness_goes_from_eager_over_partial_to_full() -> None:
    running, seen = session(), []
    seen.append(running.readiness)
    while running.capture_next() is not None:
        seen.append(running.readiness)
    assert seen == [GraphReadiness.EAGER] * 7 + [GraphReadiness.PARTIAL] * 5 + [GraphReadiness.FULL]
    assert running.is_finished


def test_captured_keys_are_dispatched_and_the_others_are_pending_meanwhile() -> None:
    running = session()
    miss = running.dispatcher.find("decode", 64, 1)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.PENDING
    finish(running)
    found = running.dispatcher.find("decode", 64, 1)
    assert found == GraphKey("decode", 64, 1)
    graph = running.graphs[found]
    graph.load({"x": torch.full((1, 64), 3.0)})
    assert graph.replay().clone().unique().tolist() == [6]


def test_progress_tells_time_and_memory() -> None:
    seen = finish(session())
    captured = [p for p in seen if p.stage is CaptureStage.CAPTURED]
    assert captured[0].graph_bytes == 4 * 64 * 4
    assert captured[-1].pool_bytes == 4 * 64 * 4, "later, smaller graphs share the first one's memory"
    assert all(p.seconds > 0 for p in seen)
    assert "captured, graphs 0 MiB" in describe(captured[0])


def test_the_collector_rests_during_a_step_only() -> None:
    states: list[bool] = []
    regions = Regions(dict.fromkeys(PLAN.keys, lambda x: states.append(gc.isenabled()) or x * 2))  # type: ignore[func-returns-value]
    finish(session(regions))
    assert not any(states)
    assert gc.isenabled()


def test_run_does_everything() -> None:
    running = session()
    running.run()
    assert running.graphs.keys() == set(PLAN.keys)
    assert running.readiness is GraphReadiness.FULL
    assert running.seconds > 0


@pytest.mark.parametrize(("when", "checked"), [("once", 1), ("always", 6), ("never", 0)])
def test_the_pre_check_runs_once_a_family_always_or_never(
    when: str, checked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def counted(*args: Any) -> Precheck:
        calls.append(args)
        return precheck_region(*args)

    monkeypatch.setattr("worker.graphs.recorder.precheck_region", counted)
    finish(session(precheck=when))
    assert len(calls) == checked


def test_out_of_memory_drops_what_cannot_fit_and_goes_on() -> None:
    running = session(capacity=2 * 64 * 4)
    seen = finish(running)
    dropped = {p.key: p.detail for p in seen if p.stage is CaptureStage.DROPPED}
    assert dropped.keys() == {GraphKey("decode", 256, 4), GraphKey("decode", 64, 4)}
    assert all("out of memory" in detail.lower() for detail in dropped.values())
    assert running.graphs.keys() == {key for key in PLAN.keys if key.bucket < 4}
    assert running.readiness is GraphReadiness.PARTIAL
    miss = running.dispatcher.find("decode", 64, 3)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.DROPPED


def test_a_drop_takes_all_larger_keys_with_it() -> None:
    keys = enumerate_keys(tiers=TIERS, decode_buckets=(1, 2, 4, 8))
    ascending = CapturePlan(keys=tuple(sorted(keys)))
    running = session(plan=ascending, capacity=64 * 4)
    seen = finish(running)
    assert [p.key for p in seen if p.stage is CaptureStage.DROPPED] == [GraphKey("decode", 64, 2)]
    assert running.graphs.keys() == {GraphKey("decode", 64, 1), GraphKey("decode", 256, 1)}
    assert len(running.dispatcher.dropped) == 6


def test_the_next_largest_key_sizes_the_pool_after_a_drop() -> None:
    running = session(max_bytes=2 * 64 * 4)
    captured = [p for p in finish(running) if p.stage is CaptureStage.CAPTURED]
    assert captured[0].key == GraphKey("decode", 256, 2)
    assert running.graphs.keys() == {key for key in PLAN.keys if key.bucket < 4}


def test_a_key_without_memory_for_its_warm_up_is_dropped_and_the_others_are_still_warmed_up_first() -> None:
    too_large = GraphKey("decode", 256, 4)

    def out_of_memory(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    running = session(Regions({too_large: out_of_memory}))
    finish(running)
    assert set(running.dispatcher.dropped) == {too_large}
    assert set(running.graphs) == set(PLAN.keys) - {too_large}


def test_memory_stuck_over_the_cap_is_won_back_by_capturing_again() -> None:
    keys = (GraphKey("decode", 64, 2), GraphKey("prefill", 64, 8), GraphKey("decode", 64, 1))
    running = session(plan=CapturePlan(keys=keys), max_bytes=4 * 64 * 4)
    finish(running)
    assert running.graphs.keys() == {keys[0], keys[2]}
    assert running.dispatcher.captured == {keys[0], keys[2]}
    assert set(running.dispatcher.dropped) == {keys[1]}


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: operation failed due to a previous error during capture"),
    ],
    ids=["memory", "another thread"],
)
def test_what_may_pass_is_tried_once_more(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [failure]
    original = FakeCapture.capture

    def capture(self: FakeCapture, run: Callable[[], Any], **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(self, run, **options)

    monkeypatch.setattr(FakeCapture, "capture", capture)
    running = session()
    finish(running)
    assert running.readiness is GraphReadiness.FULL


def test_a_key_with_a_trap_runs_eagerly_and_the_rest_is_captured() -> None:
    bad = GraphKey("decode", 64, 2)
    running = session(Regions({bad: lambda x: x.sum().item()}), precheck="always")
    seen = finish(running)
    (dropped,) = [p for p in seen if p.stage is CaptureStage.DROPPED]
    assert dropped.key == bad
    assert "Tensor.item" in dropped.detail
    assert running.graphs.keys() == set(PLAN.keys) - {bad}
    assert running.readiness is GraphReadiness.PARTIAL


def test_a_strict_session_raises_the_trap_and_can_go_on() -> None:
    bad = PLAN.keys[0]
    running = session(Regions({bad: lambda x: x.sum().item()}), is_strict=True)
    with pytest.raises(HostSyncInRegion):
        running.capture_next()
    finish(running)
    assert running.graphs.keys() == set(PLAN.keys) - {bad}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceFault),
        (TypeError("forward() takes 1 argument"), TypeError),
    ],
)
def test_a_lost_device_or_a_broken_model_is_never_swallowed(error: Exception, expected: type[Exception]) -> None:
    def fail(_: Tensor) -> None:
        raise error

    running = session(Regions({PLAN.keys[0]: fail}))
    with pytest.raises(expected):
        running.capture_next()


def test_a_graph_that_disagrees_with_eager_is_quarantined_named_and_released() -> None:
    bad, calls = GraphKey("decode", 256, 2), []

    def drifting(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)  # a Python number that is not in the key

    running = session(Regions({bad: drifting}), self_check=SelfCheck())
    seen = finish(running)
    (quarantined,) = [p for p in seen if p.stage is CaptureStage.QUARANTINED]
    assert quarantined.key == bad
    assert "differs from eager" in quarantined.detail
    assert bad not in running.graphs
    miss = running.dispatcher.find("decode", 256, 2)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.QUARANTINED
    assert running.checks[bad].is_equal is False
    assert running.readiness is GraphReadiness.PARTIAL


def test_a_check_that_runs_out_of_memory_drops_the_key_and_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    big = PLAN.keys[0]
    original = SelfCheck.check

    def check(self: SelfCheck, graph: CapturedGraph) -> CheckResult:
        if graph.key == big:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, graph)

    monkeypatch.setattr(SelfCheck, "check", check)
    running = session(self_check=SelfCheck())
    finish(running)
    assert big in running.dispatcher.dropped
    assert big not in running.graphs
    assert running.graphs


def test_a_graph_in_service_can_be_checked_again() -> None:
    key, factor = PLAN.keys[0], [2.0]
    running = session(Regions({key: lambda x: x * factor[0]}), self_check=SelfCheck())
    finish(running)
    assert running.recheck(key).is_equal
    factor[0] = 3.0
    assert not running.recheck(key).is_equal
    assert key in running.dispatcher.quarantined
    assert key not in running.graphs


def test_keys_left_out_of_the_plan_are_reported_as_dropped_but_do_not_hold_readiness_back() -> None:
    plan = plan_captures(enumerate_keys(tiers=TIERS, decode_buckets=BUCKETS), max_keys=4)
    running = session(plan=plan)
    finish(running)
    assert len(running.dispatcher.dropped) == 2
    assert running.readiness is GraphReadiness.FULL


def test_a_closed_session_holds_nothing() -> None:
    running = session()
    finish(running)
    graph = running.graphs[PLAN.keys[0]]
    running.close()
    assert graph.is_released
    assert not running.graphs
    assert running.dispatcher.captured == frozenset()
    assert running.readiness is GraphReadiness.EAGER


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="num_warmup_steps"):
        SessionOptions(num_warmup_steps=0)
    with pytest.raises(ValueError, match="precheck"):
        SessionOptions(precheck="sometimes")  # type: ignore[arg-type]


def test_the_bar_follows_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    with CaptureBar() as bar:
        finish(session(on_progress=bar, capacity=2 * 64 * 4))
    assert "decode/t256/b4/default dropped" in screen.getvalue()
