"""Finds the layer and the operator whose capture fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.graphs.backend import CaptureBackend, backend_for
from worker.graphs.errors import GraphError
from worker.graphs.key import GraphKey
from worker.graphs.module_call import ModuleCall
from worker.graphs.module_runner import device_of
from worker.graphs.pool import GraphPool
from worker.graphs.precheck import precheck_region
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion

_ROOT = "(root)"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submodule that was captured by itself."""

    path: str
    error: str
    """Empty if the capture succeeded."""


@dataclass(frozen=True, slots=True)
class FailingLayer:
    """The innermost submodule whose capture fails, and why."""

    path: str
    """Its name in the model; "(root)" for the model itself."""
    layer: str
    """Its class."""
    error: GraphError
    """Names operator and line where they are known."""
    attempts: tuple[Attempt, ...]
    """Every submodule that was tried, in order."""


def find_failing_layer(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: CaptureBackend | None = None,
) -> FailingLayer | None:
    """Capture the module on its own, then what it calls, down to the innermost part that fails; None if all is well.

    Each part runs on the inputs it really gets, recorded in one eager run. Works on the CPU with the emulation. State
    that a part changes, such as a cache, is not judged here.
    """
    backend = backend or backend_for(device_of(module, ModuleCall(args, kwargs)))
    calls = record_calls(module, args, kwargs or {})
    attempts: list[Attempt] = []
    path, error = _ROOT, _try(module, calls[""], _ROOT, backend, attempts)
    if error is None:
        return None
    name, found = "", error
    while (inner := _first_failing(module, name, calls, backend, attempts)) is not None:
        name, found = inner
        path = name
    return FailingLayer(path, type(module.get_submodule(name)).__name__, found, tuple(attempts))


def record_calls(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, ModuleCall]:
    """Run the module once, eagerly; the arguments of the first call of every submodule, by name, in call order."""
    calls: dict[str, ModuleCall] = {}
    hooks = [
        submodule.register_forward_pre_hook(_recording(name, calls), with_kwargs=True)
        for name, submodule in module.named_modules()
    ]
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _recording(name: str, calls: dict[str, ModuleCall]) -> Any:
    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls:
            calls[name] = ModuleCall(args, kwargs).as_static()

    return record


def _first_failing(
    module: nn.Module, name: str, calls: Mapping[str, ModuleCall], backend: CaptureBackend, attempts: list[Attempt]
) -> tuple[str, GraphError] | None:
    for child in _called_inside(name, calls):
        error = _try(module.get_submodule(child), calls[child], child, backend, attempts)
        if error is not None:
            return child, error
    return None


def _called_inside(name: str, calls: Mapping[str, ModuleCall]) -> Iterator[str]:
    """Submodules that ran inside `name`, without those that ran inside another of them."""
    prefix = f"{name}." if name else ""
    inside = [path for path in calls if path and path != name and path.startswith(prefix)]
    for path in inside:
        if not any(path.startswith(f"{other}.") for other in inside):
            yield path


def _try(
    module: nn.Module, call: ModuleCall, path: str, backend: CaptureBackend, attempts: list[Attempt]
) -> GraphError | None:
    region = call.region(module, reset=_keep_changes)
    error = _capture_error(region, path, backend)
    attempts.append(Attempt(path, "" if error is None else str(error)))
    return error


def _capture_error(region: CaptureRegion, path: str, backend: CaptureBackend) -> GraphError | None:
    pool = GraphPool(backend)
    recorder = GraphRecorder(pool)
    key = GraphKey("decode", 0, 1, path)
    try:
        recorder.warm_up(key, region)
        recorder.release(recorder.capture(key, region))
    except GraphError as error:
        return error
    return None


def _keep_changes() -> None:
    """Bisection does not put state back: the model is being examined, not served."""


def describe_findings(
    module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Everything the pre-check finds in one eager run of the whole module, one line each."""
    call = ModuleCall(args, kwargs).as_static()
    return [str(finding) for finding in precheck_region(call.region(module, reset=_keep_changes)).findings]
