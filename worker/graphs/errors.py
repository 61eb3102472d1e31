"""Everything that can go wrong between a Python function and the replay of its graph.

GraphError                          (a WorkerError; names cause and remedy)
├── CaptureError                    the region cannot be captured
│   ├── HostSyncInRegion            trap 1: the host waits for the device inside the region
│   │   └── DataDependentShape      an operator whose output shape depends on values
│   ├── ControlFlowOnValues         trap 2: Python branches on a tensor's value
│   ├── UnregisteredRandomness      trap 3: dropout or a generator that the graph does not know
│   ├── MissingWarmUp               trap 6: captured before it ever ran
│   ├── StaleState                  trap 7: warm-up changed state that nobody puts back
│   ├── AllocatorInRegion           trap 8: memory is resized, pinned or returned inside the region
│   ├── OptimizerInRegion           trap 8: an optimizer that is not capturable
│   ├── DriverTooOld                trap 9
│   ├── OtherThreadCall             trap 11: the capture was invalidated from outside the region
│   ├── FirstUseInRegion            trap 12: something compiled or initialised itself during capture
│   ├── UnjoinedStream              work was left on another stream
│   ├── CaptureOutOfMemory          no memory for this graph, or the cap is reached
│   └── CaptureFailed               CUDA refused for a reason of its own
├── ReplayError                     a captured graph cannot be replayed like this
│   ├── ShapeNotCaptured            trap 4: no captured shape covers the call
│   ├── InputMismatch               trap 4: an input differs from the captured one
│   ├── AddressChanged              trap 5: a captured tensor moved
│   ├── OutputOverwritten           trap 10: an output outlives its memory
│   └── GraphReleased               the graph is gone
└── DeviceFault                     the CUDA context is lost: the process must exit
"""

from __future__ import annotations

from typing import ClassVar

from worker.errors import WorkerError


class GraphError(WorkerError):
    """What happened (`detail`), at which source line (`where`), for which graph (`key`); why and what to do."""

    cause: ClassVar[str] = "The graph could not be used."
    remedy: ClassVar[str] = "Run this shape eagerly."

    def __init__(self, detail: str, where: str = "", key: str = "") -> None:
        super().__init__(detail, where, key)
        self.detail = detail
        self.where = where
        self.key = key

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        graph = f"[{self.key}] " if self.key else ""
        return f"{graph}{self.detail}{place}. Cause: {self.cause} Remedy: {self.remedy}"


class CaptureError(GraphError):
    """The region cannot be captured as it is."""

    cause = "The region did something that a CUDA graph cannot record."
    remedy = "Move it out of the region, or capture parts of the model only."


class HostSyncInRegion(CaptureError):
    """The host waits for, or copies from or to, the device in the middle of the region."""

    cause = "A capturing stream runs nothing yet, so there is no value the host could wait for."
    remedy = (
        "Keep the value on the device (no .item(), .cpu(), .tolist(), print, synchronize), or read it after replay."
    )


class DataDependentShape(HostSyncInRegion):
    """An operator whose output shape depends on values, so the host must wait for them."""

    cause = "The output's shape depends on the values of a tensor; a graph has fixed shapes."
    remedy = "Use a fixed-size form: torch.where with three arguments, masked_fill, topk, sort, or a padded index."


class ControlFlowOnValues(CaptureError):
    """Python takes a branch by the value of a tensor."""

    cause = "An if, while or assert on a tensor's value would be frozen to the branch taken at capture."
    remedy = (
        "Compute both sides and select with torch.where, or capture one graph per branch with the branch in the key."
    )


class UnregisteredRandomness(CaptureError):
    """Random numbers are drawn from a generator that the graph does not advance."""

    cause = "Dropout is active, or a generator is not registered: every replay would draw the same numbers."
    remedy = "Call .eval(), or name the generator in `generators` so that each replay advances it."


class MissingWarmUp(CaptureError):
    """The region has not run often enough before its capture."""

    cause = "The first runs compile, tune and allocate; recorded, they would freeze a half-tuned or failing state."
    remedy = "Warm the same shape up first, three steps or more."


class StaleState(CaptureError):
    """Warm-up wrote to a tensor that outlives it, and nothing puts the old values back."""

    cause = "The region changes a tensor that it did not create, such as a cache, so warm-up leaves garbage in it."
    remedy = "Declare it as `state` (saved and put back), as `scratch` (contents do not matter), or pass `reset`."


class AllocatorInRegion(CaptureError):
    """Memory is grown, pinned or given back while the graph is recorded."""

    cause = "Growing, pinning or returning memory changes addresses that the graph has recorded, or is refused by CUDA."
    remedy = "Allocate at full size before warm-up and only write in place; never empty a cache in the region."


class OptimizerInRegion(CaptureError):
    """An optimizer steps inside the region without being capturable."""

    cause = "An optimizer that is not capturable reads its step count on the host and freezes it."
    remedy = "Build it with capturable=True (and fused=True, lr as a tensor), or step outside the region."


class DriverTooOld(CaptureError):
    """The NVIDIA driver does not support what this build of torch needs."""

    cause = "The driver is older than the CUDA runtime that torch was built for, or than graph support (470)."
    remedy = "Update the driver, or install a torch build for the older CUDA version."


class OtherThreadCall(CaptureError):
    """The capture was invalidated although the region itself raised nothing."""

    cause = (
        "Another thread's CUDA call, the legacy default stream, or an error swallowed in the region ended the capture."
    )
    remedy = "Capture in thread_local mode, keep the default stream out of the region, and do not swallow CUDA errors."


class FirstUseInRegion(CaptureError):
    """A kernel was compiled, tuned or initialised for the first time during capture."""

    cause = "Just-in-time compilation, autotuning or library set-up ran inside the recorded region."
    remedy = "Warm this exact shape up until a step compiles nothing more, then capture."


class UnjoinedStream(CaptureError):
    """Work on another stream was not joined to the capturing stream."""

    cause = "The region forked to another stream and did not wait for it, or waits for an event not recorded in it."
    remedy = "Fork with side.wait_stream(current) and join with current.wait_stream(side) inside the region."


class CaptureOutOfMemory(CaptureError):
    """There is no memory left for this graph, or the pool's cap is reached."""

    cause = "The graph's buffers and its executable need more memory than is free or allowed."
    remedy = "Drop the largest buckets, raise the cap, or leave more memory outside the KV pool."


class CaptureFailed(CaptureError):
    """CUDA or torch refused the capture for another reason; the original error is the __cause__."""

    cause = "CUDA or torch refused the capture."
    remedy = "Find the layer and operator with worker.graphs.bisect, then change or exclude it."


class ReplayError(GraphError):
    """A captured graph cannot be replayed this way."""


class ShapeNotCaptured(ReplayError):
    """No captured graph covers the shape of the call."""

    cause = "A graph has the shapes it was captured with and no others."
    remedy = "Add a bucket that covers it, pad the call, or run it eagerly."


class InputMismatch(ReplayError):
    """An input is missing, unexpected, or differs in shape, dtype, device or Python value from the captured one."""

    cause = "A graph reads its static buffers over their full captured extent and bakes every Python value in."
    remedy = "Pass exactly the captured inputs, or capture a graph for this call."


class AddressChanged(ReplayError):
    """A tensor that the graph reads or writes by address has moved."""

    cause = "A parameter, cache or static buffer was replaced or re-allocated after capture."
    remedy = "Write into the old tensor with copy_, or capture again."


class OutputOverwritten(ReplayError):
    """An output was read too late, or a replay came while one was being read."""

    cause = "Graphs share memory: the next replay of the pool overwrites the outputs of the last."
    remedy = "Read outputs inside `with graph.replay() as outputs`, or take `graph.replay().clone()`."


class GraphReleased(ReplayError):
    """The graph was released and holds no memory any more."""

    cause = "The graph was dropped, quarantined or closed."
    remedy = "Capture it again."


class DeviceFault(GraphError):
    """The CUDA context is lost; nothing on this device works in this process any more."""

    cause = "An illegal address or a device assert: often a static buffer freed or reused, or an index out of range."
    remedy = "Let the process exit and start again; reproduce with CUDA_LAUNCH_BLOCKING=1 and the eager runner."
