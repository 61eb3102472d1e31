"""The twelve traps of graph capture, and which of them an error from CUDA or torch is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from worker.graphs import errors
from worker.graphs.errors import CaptureFailed, GraphError
from worker.graphs.frames import files_of, raising_line

Stage = Literal["warm-up", "capture", "replay"]

OLDEST_DRIVER = 11040
"""CUDA 11.4, driver 470: the first that graphs are supported on."""


@dataclass(frozen=True, slots=True)
class Trap:
    """A known way to fail: its name, and the errors that report it."""

    name: str
    errors: tuple[type[GraphError], ...]


TRAPS: tuple[Trap, ...] = (
    Trap("host sync in the captured region", (errors.HostSyncInRegion, errors.DataDependentShape)),
    Trap("control flow on tensor values", (errors.ControlFlowOnValues,)),
    Trap("dropout or generator not registered", (errors.UnregisteredRandomness,)),
    Trap("shape not captured", (errors.ShapeNotCaptured, errors.InputMismatch)),
    Trap("address changed", (errors.AddressChanged,)),
    Trap("missing warm-up", (errors.MissingWarmUp,)),
    Trap("stale cache after warm-up", (errors.StaleState,)),
    Trap("optimizer or allocator in the region", (errors.OptimizerInRegion, errors.AllocatorInRegion)),
    Trap("driver too old", (errors.DriverTooOld,)),
    Trap("output overwritten", (errors.OutputOverwritten,)),
    Trap("another thread's CUDA call", (errors.OtherThreadCall,)),
    Trap("first-use compilation", (errors.FirstUseInRegion,)),
)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """An exception, in the form the rules look at it."""

    error: BaseException
    message: str
    files: tuple[str, ...]
    source: str
    """The line of code that raised, stripped."""
    stage: Stage

    def says(self, *phrases: str) -> bool:
        return any(phrase in self.message for phrase in phrases)

    def passed(self, *parts: str) -> bool:
        return any(part in file for file in self.files for part in parts)

    @property
    def is_refusal(self) -> bool:
        """CUDA refused a call because the stream is capturing, or because an earlier call was refused."""
        return self.says("stream is capturing", "streamcapture", "during capture", "during cuda graph capture")


def diagnose(error: BaseException, *, stage: Stage, key: str = "") -> GraphError | None:
    """The GraphError that explains an exception raised while warming up, capturing or replaying.

    None if it has nothing to do with graphs, such as a TypeError in the model: raise the original then.
    """
    if isinstance(error, GraphError):
        return error
    where, source = raising_line(error.__traceback__)
    evidence = _Evidence(
        error, f"{type(error).__name__}: {error}".lower(), files_of(error.__traceback__), source, stage
    )
    for applies, explanation in _RULES:
        if applies(evidence):
            return explanation(_first_line(error), where, key)
    return None


def check_driver(driver: int | None, built_for: str | None) -> None:
    """Raise DriverTooOld unless a driver of this CUDA version runs a torch built for that one.

    `driver` is 1000 * major + 10 * minor, None without a driver; `built_for` is `torch.version.cuda`, None for a CPU build.
    """
    if built_for is None:
        raise errors.DriverTooOld("this build of torch has no CUDA")
    if driver is None:
        raise errors.DriverTooOld("no NVIDIA driver was found")
    major = int(built_for.split(".")[0])
    if driver < OLDEST_DRIVER or driver // 1000 < major:
        detail = f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, torch was built for {built_for}"
        raise errors.DriverTooOld(detail)


def is_device_fault(error: BaseException) -> bool:
    """Whether the error leaves the CUDA context unusable, so that the process must exit."""
    if isinstance(error, errors.DeviceFault):
        return True
    code = getattr(error, "error_code", None)  # of a torch.AcceleratorError: a cudaError_t
    if isinstance(code, int):
        return code in _FAULT_CODES
    message = f"{error}".lower()
    return any(phrase in message for phrase in _FAULTS)


_FAULT_CODES = frozenset(
    {
        214,  # uncorrectable ECC error
        220,  # uncorrectable NVLink error
        226,  # a contained hardware error
        700,  # illegal address
        702,  # launch timeout
        709,  # context is destroyed
        710,  # device-side assert
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # tensor memory leak
    }
)
"""Those of CUDA's errors after which every call in this process fails."""

# In messages without a code: torch's own wording around any CUDA error speaks of "device-side assertions" too.
_FAULTS = (
    "illegal memory access",
    "device-side assert triggered",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "unspecified launch failure",
    "launch timed out",
    "context is destroyed",
    "global/shared address space",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "hardware stack error",
)
_COMPILERS = ("/triton/", "/torch/_inductor/", "/torch/_dynamo/", "/torch/utils/cpp_extension")


_BRANCH = re.compile(r"\b(if|elif|while|assert|not|bool)\b")
_READ = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|nonzero)\(")


def _branches_on_a_value(evidence: _Evidence) -> bool:
    return evidence.is_refusal and bool(_BRANCH.search(evidence.source)) and not _READ.search(evidence.source)


def _allocates(evidence: _Evidence) -> bool:
    return evidence.is_refusal and (
        evidence.says("cudamalloc", "cudahostalloc", "allocates", "pin_memory")
        or any(word in evidence.source for word in ("pin_memory", "empty_cache", "resize_"))
    )


_RULES: tuple[tuple[Callable[[_Evidence], bool], type[GraphError]], ...] = (
    (lambda it: isinstance(it.error, torch.OutOfMemoryError) or it.says("out of memory"), errors.CaptureOutOfMemory),
    (lambda it: is_device_fault(it.error), errors.DeviceFault),
    (
        lambda it: it.says("driver version is insufficient", "initialization error", "forward compat"),
        errors.DriverTooOld,
    ),
    (lambda it: it.is_refusal and it.passed(*_COMPILERS), errors.FirstUseInRegion),
    (lambda it: it.says("cuda generator", "cudagenerator", "offset increment"), errors.UnregisteredRandomness),
    (lambda it: it.says("capturable=false", "capturable=true"), errors.OptimizerInRegion),
    (lambda it: it.is_refusal and it.passed("/torch/optim/"), errors.OptimizerInRegion),
    (lambda it: it.says("status_not_initialized", "cublascreate", "cudnncreate"), errors.FirstUseInRegion),
    (lambda it: it.says("unjoined", "isolation", "capture_unmatched", "was merged"), errors.UnjoinedStream),
    (lambda it: it.says("streamcaptureimplicit", "legacy stream", "implicit dependency"), errors.OtherThreadCall),
    (lambda it: it.says("cannot copy between cpu and cuda tensors"), errors.HostSyncInRegion),
    (_branches_on_a_value, errors.ControlFlowOnValues),
    (_allocates, errors.AllocatorInRegion),
    (lambda it: it.says("previous error during capture", "streamcaptureinvalidated"), errors.OtherThreadCall),
    (lambda it: it.is_refusal, errors.HostSyncInRegion),
    (lambda it: it.stage == "capture" and it.says("cuda error", "cudaerror", "cuda graph"), CaptureFailed),
)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
