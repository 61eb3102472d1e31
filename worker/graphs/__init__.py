"""Capture work once as a CUDA graph, replay it for the price of one launch: for any region, any module, any engine.

How the pieces fit, from the outside in:

* `CUDAGraphRunner` (warmup, capture, replay) and `BucketedGraphRunner` (a cache by batch size and length) wrap a module by
  hand; `PartialGraphs` captures only some of its submodules.
* An engine describes each `GraphKey` as a `CaptureRegion`, orders the keys with `plan_captures`, and lets a
  `CaptureSession` capture them one at a time between steps; a `Dispatcher` owns the set of captured keys and says which
  one serves a batch, or why none does (`Miss`); `SelfCheck` compares each with eager.
* Below them, a `GraphRecorder` warms up, pre-checks (`precheck_region`), captures and diagnoses (`diagnose`); a `GraphPool` owns
  the memory and its cap; a `CaptureBackend` does the work: `CudaCapture`, or `FakeCapture` on a machine without a GPU.
* `CapturedGraph.replay` returns a `ReplayLease`: outputs are read inside `with`, cloned, or sent to the host by a
  `HostReadback`; reading them after the pool's next replay raises.
* `smoke_test`, `find_failing_layer` and `SyncCounter` are for people who look for a fault.

Every error is a `GraphError` that names cause and remedy. Nothing here waits for the whole device on a step path.
Importing this package does not import torch; the names below load on first use. `errors`, `key`, `dispatcher` and `plan`
never need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.graphs.backend import CaptureBackend as CaptureBackend
    from worker.graphs.backend import MemoryReading as MemoryReading
    from worker.graphs.backend import backend_for as backend_for
    from worker.graphs.bisect import FailingLayer as FailingLayer
    from worker.graphs.bisect import find_failing_layer as find_failing_layer
    from worker.graphs.bucketed import BucketedGraphRunner as BucketedGraphRunner
    from worker.graphs.bucketed import PaddedAxes as PaddedAxes
    from worker.graphs.captured import CaptureCost as CaptureCost
    from worker.graphs.captured import CapturedGraph as CapturedGraph
    from worker.graphs.cuda_backend import CudaCapture as CudaCapture
    from worker.graphs.dispatcher import Dispatcher as Dispatcher
    from worker.graphs.dispatcher import Miss as Miss
    from worker.graphs.dispatcher import MissReason as MissReason
    from worker.graphs.errors import GraphError as GraphError
    from worker.graphs.fake_backend import FakeCapture as FakeCapture
    from worker.graphs.gc_freeze import frozen_gc as frozen_gc
    from worker.graphs.key import GraphKey as GraphKey
    from worker.graphs.lanes import InputLane as InputLane
    from worker.graphs.lease import ReplayLease as ReplayLease
    from worker.graphs.module_runner import CUDAGraphRunner as CUDAGraphRunner
    from worker.graphs.partial import PartialGraphs as PartialGraphs
    from worker.graphs.plan import CapturePlan as CapturePlan
    from worker.graphs.plan import enumerate_keys as enumerate_keys
    from worker.graphs.plan import plan_captures as plan_captures
    from worker.graphs.pool import GraphPool as GraphPool
    from worker.graphs.precheck import precheck_region as precheck_region
    from worker.graphs.progress import CaptureBar as CaptureBar
    from worker.graphs.progress import CaptureProgress as CaptureProgress
    from worker.graphs.progress import CaptureStage as CaptureStage
    from worker.graphs.readback import HostReadback as HostReadback
    from worker.graphs.recorder import GraphRecorder as GraphRecorder
    from worker.graphs.region import CaptureRegion as CaptureRegion
    from worker.graphs.region import module_tables as module_tables
    from worker.graphs.self_check import CheckResult as CheckResult
    from worker.graphs.self_check import SelfCheck as SelfCheck
    from worker.graphs.self_check import Tolerance as Tolerance
    from worker.graphs.session import CaptureSession as CaptureSession
    from worker.graphs.session import SessionOptions as SessionOptions
    from worker.graphs.smoke import SmokeResult as SmokeResult
    from worker.graphs.smoke import smoke_test as smoke_test
    from worker.graphs.sync_counter import SyncCounter as SyncCounter
    from worker.graphs.sync_counter import SyncKind as SyncKind
    from worker.graphs.traps import TRAPS as TRAPS
    from worker.graphs.traps import check_driver as check_driver
    from worker.graphs.traps import diagnose as diagnose
    from worker.graphs.traps import is_device_fault as is_device_fault

_HOMES = {
    "backend": ("CaptureBackend", "MemoryReading", "backend_for"),
    "bisect": ("FailingLayer", "find_failing_layer"),
    "bucketed": ("BucketedGraphRunner", "PaddedAxes"),
    "captured": ("CaptureCost", "CapturedGraph"),
    "cuda_backend": ("CudaCapture",),
    "dispatcher": ("Dispatcher", "Miss", "MissReason"),
    "errors": ("GraphError",),
    "fake_backend": ("FakeCapture",),
    "gc_freeze": ("frozen_gc",),
    "key": ("GraphKey",),
    "lanes": ("InputLane",),
    "lease": ("ReplayLease",),
    "module_runner": ("CUDAGraphRunner",),
    "partial": ("PartialGraphs",),
    "plan": ("CapturePlan", "enumerate_keys", "plan_captures"),
    "pool": ("GraphPool",),
    "precheck": ("precheck_region",),
    "progress": ("CaptureBar", "CaptureProgress", "CaptureStage"),
    "readback": ("HostReadback",),
    "recorder": ("GraphRecorder",),
    "region": ("CaptureRegion", "module_tables"),
    "self_check": ("CheckResult", "SelfCheck", "Tolerance"),
    "session": ("CaptureSession", "SessionOptions"),
    "smoke": ("SmokeResult", "smoke_test"),
    "sync_counter": ("SyncCounter", "SyncKind"),
    "traps": ("TRAPS", "check_driver", "diagnose", "is_device_fault"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)
