"""Captures a plan key by key, so that an engine can serve between two captures."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from worker.graphs.captured import CapturedGraph
from worker.graphs.dispatcher import Dispatcher
from worker.graphs.errors import CaptureError, CaptureOutOfMemory, OtherThreadCall
from worker.graphs.gc_freeze import frozen_gc
from worker.graphs.key import GraphKey, Phase
from worker.graphs.plan import CapturePlan, SizeOf, at_least_as_large, size_by_shape
from worker.graphs.pool import GraphPool
from worker.graphs.progress import CaptureProgress, CaptureStage
from worker.graphs.recorder import MIN_WARMUP_STEPS, WARMUP_STEPS, GraphRecorder
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import CheckResult, SelfCheck
from worker.graphs.traps import diagnose
from worker.load import GraphReadiness

RegionOf = Callable[[GraphKey], CaptureRegion]
_Pass = Literal["warm", "capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How to capture."""

    num_warmup_steps: int = WARMUP_STEPS
    """Eager steps of each shape before its capture."""
    two_pass: bool = True
    """Warm every shape before capturing any, so that warm-up's memory is returned before graphs claim theirs. False =
    capture each key right after its warm-up: graphs are usable sooner, at a higher peak."""
    precheck: Literal["once", "always", "never"] = "once"
    """Look for traps in the first warm-up step: of the first key of each phase and variant, of every key, or of none."""
    is_strict: bool = False
    """Raise when a key cannot be captured, instead of leaving it to eager execution. Lack of memory never raises."""

    def __post_init__(self) -> None:
        if self.num_warmup_steps < MIN_WARMUP_STEPS:
            raise ValueError(f"num_warmup_steps must be at least {MIN_WARMUP_STEPS}, got {self.num_warmup_steps}")
        if self.precheck not in ("once", "always", "never"):
            raise ValueError(f"precheck must be once, always or never, got {self.precheck!r}")


class CaptureSession:
    """Works through a plan, one step a call: warm a key up, or capture and check one.

    Every key ends captured (the dispatcher returns it), dropped (no memory, or a trap) or quarantined (it disagreed with
    eager). Lack of memory drops the key and all that need no less. Used by the thread that replays.
    """

    def __init__(
        self,
        plan: CapturePlan,
        region_of: RegionOf,
        *,
        pool: GraphPool,
        dispatcher: Dispatcher,
        options: SessionOptions | None = None,
        self_check: SelfCheck | None = None,
        on_progress: Callable[[CaptureProgress], None] | None = None,
        size_of: SizeOf = size_by_shape,
    ) -> None:
        self.dispatcher = dispatcher
        self.recorder = GraphRecorder(pool)
        self._pool = pool
        self._region_of = region_of
        self._options = options or SessionOptions()
        self._self_check = self_check
        self._on_progress = on_progress
        self._size_of = size_of
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._checks: dict[GraphKey, CheckResult] = {}
        self._prechecked: set[tuple[Phase, str]] = set()
        self._work: deque[tuple[_Pass, GraphKey]] = _schedule(plan, two_pass=self._options.two_pass)
        self._lost: set[GraphKey] = set()
        self._done = 0
        self._seconds = 0.0
        dispatcher.expect(plan.keys)
        for dropped in plan.dropped:
            dispatcher.drop(dropped.key, dropped.reason)

    @property
    def graphs(self) -> Mapping[GraphKey, CapturedGraph]:
        """The captured graphs by key."""
        return MappingProxyType(self._graphs)

    @property
    def checks(self) -> Mapping[GraphKey, CheckResult]:
        """What the self-check found, by key."""
        return MappingProxyType(self._checks)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to warm up or capture."""
        return not self._work

    @property
    def waiting(self) -> tuple[GraphKey, ...]:
        """Keys that are not captured yet."""
        return tuple(dict.fromkeys(key for _, key in self._work))

    @property
    def next_key(self) -> GraphKey | None:
        """What the next step is about."""
        return self._work[0][1] if self._work else None

    @property
    def num_left(self) -> int:
        """Warm-ups and captures that are left, as far as is known."""
        return len(self._work)

    @property
    def seconds(self) -> float:
        """Time spent in this session so far."""
        return self._seconds

    @property
    def readiness(self) -> GraphReadiness:
        """EAGER without a graph, FULL when every planned key has one that agrees with eager, PARTIAL between."""
        if not self._graphs:
            return GraphReadiness.EAGER
        return GraphReadiness.PARTIAL if self._work or self._lost else GraphReadiness.FULL

    def run(self) -> None:
        """Do all that is left, in one go."""
        with frozen_gc():
            while self.capture_next() is not None:
                pass

    def capture_next(self) -> CaptureProgress | None:
        """One step: tens of milliseconds to a few hundred. None when nothing is left.

        The garbage collector does not run inside. With `is_strict`, raises the CaptureError of a key that cannot be
        captured; the session goes on with the next key when called again. A DeviceFault, and an exception that has
        nothing to do with graphs, always pass through.
        """
        if not self._work:
            return None
        work, key = self._work.popleft()
        started = time.perf_counter()
        before = self._pool.used_bytes
        try:
            with frozen_gc(collect=False):
                stage, detail = self._warm_up(key) if work == "warm" else self._capture(key)
        except CaptureOutOfMemory as error:
            _free_frames(error)
            stage, detail = CaptureStage.DROPPED, self._drop_what_cannot_fit(key, error)
        except CaptureError as error:
            self._give_up(key, str(error))
            if self._options.is_strict:
                raise
            _free_frames(error)
            stage, detail = CaptureStage.DROPPED, str(error)
        except Exception as error:
            self._give_up(key, f"{type(error).__name__} while capturing")
            raise
        return self._report(key, stage, detail, time.perf_counter() - started, self._pool.used_bytes - before)

    def release(self, key: GraphKey, reason: str) -> None:
        """Take a captured graph out of service for good."""
        self._lost.add(key)
        self.dispatcher.drop(key, reason)
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self.recorder.release(graph)

    def recheck(self, key: GraphKey) -> CheckResult:
        """Compare a graph in service with eager again; one that disagrees is quarantined. Waits for the device."""
        assert self._self_check is not None, "the session has no self-check"
        self._checks[key] = result = self._compared(self._self_check, self._graphs[key])
        if not result.is_equal:
            self._quarantine(key, result)
        return result

    def close(self) -> None:
        """Release every graph and return their memory."""
        self._work.clear()
        for key in tuple(self._graphs):
            self.release(key, "the session was closed")
        self._pool.close()

    def _warm_up(self, key: GraphKey) -> tuple[CaptureStage, str]:
        family = (key.phase, key.variant)
        check = self._options.precheck == "always" or (
            self._options.precheck == "once" and family not in self._prechecked
        )
        self.recorder.warm_up(key, self._region_of(key), num_steps=self._options.num_warmup_steps, check=check)
        self._prechecked.add(family)
        if self._options.two_pass and not any(work == "warm" for work, _ in self._work):
            self._pool.backend.trim()
        return CaptureStage.WARMED, ""

    def _capture(self, key: GraphKey) -> tuple[CaptureStage, str]:
        region = self._region_of(key)
        try:
            graph = self.recorder.capture(key, region)
        except (CaptureOutOfMemory, OtherThreadCall) as error:
            if error.__cause__ is None:  # the cap, not the device: trying again would not help
                raise
            _free_frames(error)
            self._pool.backend.trim()
            graph = self.recorder.capture(key, region)
        self._graphs[key] = graph
        if self._self_check is not None:
            self._checks[key] = result = self._compared(self._self_check, graph)
            if not result.is_equal:
                self._quarantine(key, result)
                return CaptureStage.QUARANTINED, result.detail
        self.dispatcher.add(key)
        return CaptureStage.CAPTURED, ""

    def _compared(self, self_check: SelfCheck, graph: CapturedGraph) -> CheckResult:
        try:
            return self_check.check(graph)
        except RuntimeError as error:
            explained = diagnose(error, stage="replay", key=str(graph.key))
            if explained is None:
                raise
            raise explained from error

    def _quarantine(self, key: GraphKey, result: CheckResult) -> None:
        self._lost.add(key)
        self.dispatcher.quarantine(key, result.detail)
        self.recorder.release(self._graphs.pop(key))

    def _drop_what_cannot_fit(self, key: GraphKey, error: CaptureOutOfMemory) -> str:
        """Drop the key and those that need no less; the largest one left of its phase is then next, to size the pool."""
        waiting = dict.fromkeys(waiting for _, waiting in self._work)
        larger = at_least_as_large(key, waiting)
        self._give_up(key, error.detail)
        for other in larger:
            self._give_up(other, f"{key} did not fit in memory: {error.detail}")
        if self._pool.is_over_cap:
            self._capture_all_again()
        if not any(graph.phase == key.phase for graph in self._graphs):
            self._advance_largest(key.phase)
        return error.detail + (f"; {len(larger)} larger key(s) dropped with it" if larger else "")

    def _capture_all_again(self) -> None:
        """Only an empty pool gives its memory back: captured graphs leave it and go to the front of the queue."""
        for key in reversed(tuple(self._graphs)):
            self.dispatcher.withdraw(key)
            self.recorder.release(self._graphs.pop(key))
            self._work.appendleft(("capture", key))
        self._pool.close()

    def _advance_largest(self, phase: Phase) -> None:
        waiting = [work for work in self._work if work[0] == "capture" and work[1].phase == phase]
        if waiting and self._options.two_pass:
            largest = max(waiting, key=lambda work: self._size_of(work[1]))
            self._work.remove(largest)
            self._work.insert(sum(work == "warm" for work, _ in self._work), largest)  # not before its warm-up

    def _give_up(self, key: GraphKey, reason: str) -> None:
        self._lost.add(key)
        self.dispatcher.drop(key, reason)
        self.recorder.forget(key)
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self.recorder.release(graph)
        self._work = deque(work for work in self._work if work[1] != key)

    def _report(self, key: GraphKey, stage: CaptureStage, detail: str, seconds: float, taken: int) -> CaptureProgress:
        self._done += 1
        self._seconds += seconds
        progress = CaptureProgress(
            key=key,
            stage=stage,
            done=self._done,
            total=self._done + len(self._work),
            seconds=seconds,
            graph_bytes=max(0, taken),
            pool_bytes=self._pool.used_bytes,
            free_bytes=self._pool.backend.memory().free_bytes,
            detail=detail,
        )
        if self._on_progress is not None:
            self._on_progress(progress)
        return progress


def _schedule(plan: CapturePlan, *, two_pass: bool) -> deque[tuple[_Pass, GraphKey]]:
    if two_pass:
        return deque([*(("warm", key) for key in plan.keys), *(("capture", key) for key in plan.keys)])
    return deque(step for key in plan.keys for step in (("warm", key), ("capture", key)))


def _free_frames(error: BaseException | None) -> None:
    """Let go of the tensors that the frames of an error hold, so that their memory can be used."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
