"""Each trap of the field ends in an error that names its cause and its remedy."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from types import CodeType

import pytest
import torch

from tests.fakes.torch_captures import accelerator_error
from worker.errors import WorkerError
from worker.graphs import errors
from worker.graphs.errors import GraphError
from worker.graphs.traps import TRAPS, check_driver, diagnose, is_device_fault

REFUSED = "CUDA error: operation not permitted when stream is capturing"


def raised(run: Callable[[], object]) -> Exception:
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the error is what the test is about
        return error
    raise AssertionError("nothing was raised")


def raise_from(filename: str, source: str, message: str, kind: type[Exception] = RuntimeError) -> Exception:
    """An error raised by a line of code in a file of that name."""
    code: CodeType = compile(source, filename, "exec")

    def fail(*_: object) -> None:
        raise kind(message)

    return raised(lambda: exec(code, {"fail": fail}))


def every_error() -> list[type[GraphError]]:
    found, waiting = [], [GraphError]
    while waiting:
        found.append(kind := waiting.pop())
        waiting += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_names_cause_and_remedy_is_short_and_survives_pickling(kind: type[GraphError]) -> None:
    error = kind("something happened", "model.py:3 in forward", "decode/t256/b8/greedy")
    text = str(error)
    assert isinstance(error, WorkerError)
    assert kind.cause in text
    assert kind.remedy in text
    assert "decode/t256/b8/greedy" in text
    assert "model.py:3" in text
    assert len(text.encode()) <= 1024
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, text)


def test_the_twelve_traps_have_errors_of_their_own() -> None:
    assert len(TRAPS) == 12
    kinds = [kind for trap in TRAPS for kind in trap.errors]
    assert len(kinds) == len(set(kinds))
    assert len({kind.cause for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (REFUSED, errors.HostSyncInRegion),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use "
            "tensor.pin_memory() or allocate the tensor with pin_memory=True.",
            errors.HostSyncInRegion,
        ),
        ("CUDA error: operation failed due to a previous error during capture", errors.OtherThreadCall),
        ("cudaErrorStreamCaptureImplicit: disallowed implicit dependency", errors.OtherThreadCall),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", errors.UnregisteredRandomness),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.", errors.UnregisteredRandomness),
        ("Offset increment outside graph capture encountered unexpectedly.", errors.UnregisteredRandomness),
        ("CUDA error: out of memory", errors.CaptureOutOfMemory),
        ("CUDA error: an illegal memory access was encountered", errors.DeviceFault),
        ("CUDA error: device-side assert triggered", errors.DeviceFault),
        ("CUDA driver version is insufficient for CUDA runtime version", errors.DriverTooOld),
        ("CUDA error: initialization error", errors.DriverTooOld),
        ("CUDA error: capturing stream has unjoined work", errors.UnjoinedStream),
        ("cuBLAS error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", errors.FirstUseInRegion),
        ("If capturable=False, state_steps should not be CUDA tensors", errors.OptimizerInRegion),
        ("CUDA error: invalid argument", errors.CaptureFailed),
    ],
)
def test_a_message_of_cuda_or_torch_is_explained(message: str, expected: type[GraphError]) -> None:
    explained = diagnose(raise_from("model.py", "fail()", message), stage="capture", key="decode/t0/b1/x")
    assert type(explained) is expected
    assert message.split(":")[0] in str(explained)
    assert explained.key == "decode/t0/b1/x"


@pytest.mark.parametrize(
    ("filename", "source", "expected"),
    [
        ("model.py", "if fail(): pass", errors.ControlFlowOnValues),
        ("model.py", "x = 1\nwhile fail(): pass", errors.ControlFlowOnValues),
        ("model.py", "y = 1 if fail() else 2", errors.ControlFlowOnValues),
        ("model.py", "y = 1 if fail('x.item()') else 2", errors.HostSyncInRegion),
        ("model.py", "fail('pin_memory')", errors.AllocatorInRegion),
        ("/site-packages/triton/runtime/jit.py", "fail()", errors.FirstUseInRegion),
        ("/site-packages/torch/_inductor/compile_fx.py", "fail()", errors.FirstUseInRegion),
        ("/site-packages/torch/optim/adam.py", "fail()", errors.OptimizerInRegion),
        ("model.py", "fail()", errors.HostSyncInRegion),
    ],
)
def test_the_line_that_was_refused_tells_the_traps_apart(
    filename: str, source: str, expected: type[GraphError], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = source.splitlines()
    monkeypatch.setattr("linecache.getline", lambda name, number: lines[number - 1] if name == filename else "")
    inside_torch: dict[str, Callable[..., None]] = {}
    exec(compile(f"def fail(*_): raise RuntimeError({REFUSED!r})", torch.__file__, "exec"), inside_torch)
    error = raised(lambda: exec(compile(source, filename, "exec"), {"fail": inside_torch["fail"]}))
    assert type(diagnose(error, stage="capture")) is expected


def test_an_out_of_memory_error_of_torch_is_explained() -> None:
    explained = diagnose(torch.OutOfMemoryError("Tried to allocate 20 GiB"), stage="capture")
    assert isinstance(explained, errors.CaptureOutOfMemory)


def test_errors_that_are_not_about_graphs_are_left_alone() -> None:
    assert diagnose(TypeError("forward() got an unexpected argument"), stage="capture") is None
    assert diagnose(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), stage="warm-up") is None
    own = errors.StaleState("x")
    assert diagnose(own, stage="capture") is own


def test_the_line_that_raised_is_named() -> None:
    explained = diagnose(raise_from("/models/llama.py", "\n\nfail()", REFUSED), stage="capture")
    assert explained is not None
    assert re.search(r"test_graphs_traps.py:\d+ in fail", explained.where)


def test_a_driver_that_is_new_enough_passes() -> None:
    check_driver(12080, "12.6")
    check_driver(13000, "12.8")
    check_driver(13000, "13.0")


@pytest.mark.parametrize(
    ("driver", "built_for", "message"),
    [
        (12080, "13.0", "supports CUDA 12.8, torch was built for 13.0"),
        (11020, "11.8", "supports CUDA 11.2"),
        (None, "13.0", "no NVIDIA driver"),
        (13000, None, "no CUDA"),
    ],
)
def test_a_driver_that_is_too_old_or_missing_is_refused(
    driver: int | None, built_for: str | None, message: str
) -> None:
    with pytest.raises(errors.DriverTooOld, match=message):
        check_driver(driver, built_for)


WORDING = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""What torch writes below every error of CUDA."""


def test_only_errors_that_lose_the_context_are_device_faults() -> None:
    assert is_device_fault(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert is_device_fault(RuntimeError("Triton Error [CUDA]: device-side assert triggered"))
    assert is_device_fault(errors.DeviceFault("gone"))
    assert not is_device_fault(RuntimeError(REFUSED + WORDING))
    assert not is_device_fault(torch.AcceleratorError(REFUSED + WORDING))
    assert not is_device_fault(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize(
    ("code", "message", "is_fault"),
    [
        (700, "an illegal memory access was encountered", True),
        (719, "unspecified launch failure", True),
        (710, "device-side assert triggered", True),
        (214, "uncorrectable ECC error encountered", True),
        (714, "hardware stack error", True),
        (721, "worded in no way that is known", True),
        (1, "invalid argument", False),
        (2, "out of memory", False),
        (9, "invalid configuration argument", False),
        (900, "operation not permitted when stream is capturing", False),
        (901, "operation failed due to a previous error during capture", False),
        (904, "capturing stream has unjoined work", False),
    ],
)
def test_the_code_of_an_error_decides_whether_the_context_is_lost(code: int, message: str, is_fault: bool) -> None:
    error = accelerator_error(f"CUDA error: {message}{WORDING}", code)
    assert is_device_fault(error) is is_fault
    assert isinstance(diagnose(error, stage="capture"), errors.DeviceFault) is is_fault


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("operation not permitted when stream is capturing", 900, errors.HostSyncInRegion),
        ("operation failed due to a previous error during capture", 901, errors.OtherThreadCall),
        ("capturing stream has unjoined work", 904, errors.UnjoinedStream),
        ("operation would make the legacy stream depend on a capturing blocking stream", 906, errors.OtherThreadCall),
    ],
)
def test_the_wording_around_an_error_of_cuda_hides_no_meaning(name: str, code: int, expected: type[GraphError]) -> None:
    def fail() -> None:
        raise accelerator_error(f"CUDA error: {name}{WORDING}", code)

    explained = diagnose(raised(fail), stage="capture")
    assert type(explained) is expected
    assert explained.detail == f"CUDA error: {name}"
