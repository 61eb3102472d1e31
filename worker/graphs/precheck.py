"""Runs a region once, eagerly, and finds what would stop or spoil its capture, with operator and source line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from worker.graphs import operators
from worker.graphs.errors import (
    AllocatorInRegion,
    CaptureError,
    ControlFlowOnValues,
    DataDependentShape,
    HostSyncInRegion,
    OptimizerInRegion,
    StaleState,
    UnregisteredRandomness,
)
from worker.graphs.frames import calling_line
from worker.graphs.operator_mode import OperatorMode
from worker.graphs.region import CaptureRegion, storage_of
from worker.graphs.sync_counter import SyncCall, SyncPatches


@dataclass(frozen=True, slots=True)
class Precheck:
    """What one eager run of a region showed."""

    outputs: Any
    findings: tuple[CaptureError, ...]
    reads: tuple[Tensor, ...]
    """One tensor of every piece of memory that was used but not created in the region: it must stay alive."""
    num_operators: int

    def raise_first(self) -> None:
        """Raise the first finding, if any."""
        if self.findings:
            raise self.findings[0]


def precheck_region(region: CaptureRegion, key: str = "") -> Precheck:
    """Run the region once and collect findings. The run is real: it writes what the region writes.

    Only work that passes through torch's operators is seen; a kernel launched behind torch's back is not.
    """
    autocasts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if autocasts and torch.is_autocast_cache_enabled():
        detail = "autocast keeps converted weights in a cache that is emptied when its block ends"
        raise AllocatorInRegion(detail, key=key)
    findings: list[CaptureError] = []
    watch = _Operators(region, findings, key)
    with _optimizer_steps(findings, key), SyncPatches(_reporting_syncs(findings, key)), watch, _Calls(watch):
        outputs = region.run()
    return Precheck(outputs, tuple(_without_repeats(findings)), tuple(watch.reads.values()), watch.num_operators)


class _Operators(OperatorMode):
    """Sees every operator of the region."""

    def __init__(self, region: CaptureRegion, findings: list[CaptureError], key: str) -> None:
        super().__init__()
        self.reads: dict[int, Tensor] = {}
        self.num_operators = 0
        self.explained = False
        """The call that is running has been reported already, by a name closer to the user's code."""
        self._key = key
        self._findings = findings
        self._generators = region.generators
        self._created: set[int] = set()
        self._may_write = {
            storage_of(tensor) for table in (region.inputs, region.state, region.scratch) for tensor in table.values()
        }
        self._checks_writes = region.reset is None

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, then judge it."""
        result = func(*args, **kwargs)
        self.num_operators += 1
        if isinstance(func, HigherOrderOperator):
            return result
        arguments = operators.bound_arguments(func, args, kwargs)
        self._follow_memory(arguments, result)
        for error, detail in self._judge(func, arguments, result):
            self.report(error, detail)
        return result

    def report(self, error: type[CaptureError], detail: str) -> None:
        """Add a finding about the line that is running."""
        if not self.explained:
            self._findings.append(error(detail, calling_line(), self._key))

    def _follow_memory(self, arguments: dict[str, Any], result: Any) -> None:
        for tensor in operators.tensors_in(list(arguments.values())):
            if storage_of(tensor) not in self._created:
                self.reads.setdefault(storage_of(tensor), tensor)
        for tensor in operators.tensors_in(result):
            if storage_of(tensor) not in self.reads:
                self._created.add(storage_of(tensor))

    def _judge(
        self, func: OpOverload, arguments: dict[str, Any], result: Any
    ) -> Iterable[tuple[type[CaptureError], str]]:
        if operators.is_host_read(func):
            yield HostSyncInRegion, f"{func} reads a tensor's value on the host"
        elif operators.has_data_dependent_shape(func, arguments):
            yield DataDependentShape, f"{func} returns a shape that depends on values"
        elif (copy := operators.host_copy(func, arguments, result)) is not None:
            yield HostSyncInRegion, copy
        elif operators.is_random(func, arguments) and not self._is_registered(arguments.get("generator")):
            yield UnregisteredRandomness, f"{func} draws random numbers from an unregistered generator"
        elif operators.changes_memory(func, arguments):
            if func._schema.name in ("aten::pin_memory", "aten::_pin_memory") or self._grows_old_memory(arguments):
                yield AllocatorInRegion, f"{func} re-allocates or pins memory"
        elif self._checks_writes:
            for tensor in operators.written_tensors(func, arguments):
                if storage_of(tensor) in self.reads and storage_of(tensor) not in self._may_write:
                    yield (
                        StaleState,
                        f"{func} writes to a tensor of shape {list(tensor.shape)} that outlives the region",
                    )

    def _grows_old_memory(self, arguments: dict[str, Any]) -> bool:
        target = arguments.get("self")
        return bool(arguments.get("pin_memory")) or (isinstance(target, Tensor) and storage_of(target) in self.reads)

    def _is_registered(self, generator: torch.Generator | None) -> bool:
        if generator is not None:
            return any(operators.is_same_generator(generator, known) for known in self._generators)
        return any(operators.is_default_generator(known) for known in self._generators)


class _Calls(TorchFunctionMode):
    """Sees Python-level calls on tensors that never become an operator, or whose operator says less than their name."""

    def __init__(self, operators_seen: _Operators) -> None:
        super().__init__()
        self._operators = operators_seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        verdict = named_call(func, args, kwargs or {})
        if verdict is None:
            return func(*args, **(kwargs or {}))
        self._operators.report(*verdict)
        self._operators.explained = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operators.explained = False


_HOST_READS = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__int__",
        "__float__",
        "__index__",
        "__repr__",
        "__format__",
        "__array__",
    )
}


def named_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[type[CaptureError], str] | None:
    """What a call by Python name means for a capture, or None if that is left to the operators it runs."""
    if func is torch.Tensor.__bool__ or func is torch.Tensor.__contains__:
        return ControlFlowOnValues, "Python takes the truth value of a tensor"
    if func in _HOST_READS:
        return HostSyncInRegion, f"{_HOST_READS[func]} reads a tensor on the host"
    if func is torch.Tensor.to and any(
        type(value) is str and value == "cpu" for value in (*args[1:], kwargs.get("device"))
    ):
        return HostSyncInRegion, 'Tensor.to("cpu") copies a tensor to the host'
    if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None and not _is_tensor(args):
        return HostSyncInRegion, f"torch.{func.__name__} copies Python values to the device"
    if func is torch.Tensor.pin_memory:
        return AllocatorInRegion, "Tensor.pin_memory allocates pinned memory"
    return None


def _is_tensor(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _reporting_syncs(findings: list[CaptureError], key: str) -> Callable[[SyncCall], None]:
    thread = threading.get_ident()

    def report(sync: SyncCall) -> None:
        if threading.get_ident() != thread:
            return
        error = AllocatorInRegion if sync.call.endswith("empty_cache") else HostSyncInRegion
        findings.append(error(f"{sync.call} waits for {sync.kind.value}", sync.where, key))

    return report


def _without_repeats(findings: Iterable[CaptureError]) -> list[CaptureError]:
    return list({(type(finding), finding.where, finding.detail): finding for finding in findings}.values())


@contextlib.contextmanager
def _optimizer_steps(findings: list[CaptureError], key: str) -> Iterator[None]:
    """While entered, reports steps of optimizers that are not capturable."""

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            detail = f"{type(optimizer).__name__} steps with capturable=False"
            findings.append(OptimizerInRegion(detail, calling_line(), key))

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
