"""A recording of the operators of one run, replayable into the same tensors: a CUDA graph in miniature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode

from worker.graphs import operators
from worker.graphs.operator_mode import OperatorMode
from worker.graphs.precheck import named_call
from worker.graphs.region import storage_of

NOT_REGISTERED = "Attempt to increase offset for a CUDA generator not in capture mode."


class RefusedCall(torch.AcceleratorError):
    """What torch raises for a call that CUDA refuses during a capture: its wording, around the name of the call."""

    error_code = 900
    """cudaErrorStreamCaptureUnsupported."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call

    def __str__(self) -> str:
        return (
            f"CUDA error: operation not permitted when stream is capturing ({self.call})\n"
            "Search for `cudaErrorStreamCaptureUnsupported' in "
            "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
            "CUDA kernel errors might be asynchronously reported at some other API call, "
            "so the stacktrace below might be incorrect.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operator with the arguments it had: tensors by identity, numbers by value."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    created: tuple[tuple[int, Tensor], ...]
    """(place among the results, tensor) of results that are new memory: a replay writes them again."""

    def replay(self) -> None:
        results = list(operators.tensors_in(self.func(*self.args, **self.kwargs)))
        for place, target in self.created:
            if target.data_ptr() != results[place].data_ptr():
                target.copy_(results[place])


class Tape:
    """The recorded operations and the memory they created."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.created: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory created by the region, were none of it shared."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.created.values())

    def replay(self) -> None:
        """Run the operations again, on the same tensors and with the same numbers."""
        with torch.inference_mode():
            for operation in self.operations:
                operation.replay()

    def poison(self, storages: Collection[int] | None = None) -> None:
        """Overwrite created memory (all of it, or these storages), as another graph of the pool would."""
        with torch.inference_mode():
            for storage, tensor in self.created.items():
                if storages is None or storage in storages:
                    poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill with NaN, or with the smallest integer: values that cannot go unnoticed."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def record(run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Tape]:
    """Run once and record. Like a CUDA capture it leaves no trace: what the run wrote or drew is undone.

    Raises RuntimeError, worded as CUDA words it, where a CUDA capture would be refused.
    """
    recorder = _Recorder(generators)
    drawn_from = {id(generator): generator for generator in (torch.default_generator, *generators)}
    states = [(generator, generator.get_state()) for generator in drawn_from.values()]
    try:
        with recorder, _RefuseHostCalls():
            outputs = run()
    finally:
        recorder.undo()
        for generator, state in states:
            generator.set_state(state)
    return outputs, recorder.tape


class _Recorder(OperatorMode):
    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.tape = Tape()
        self._generators = generators
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and record it, unless CUDA would refuse it."""
        if isinstance(func, HigherOrderOperator):
            raise RuntimeError(f"{func} is not an operator that can be replayed here")
        arguments = operators.bound_arguments(func, args, kwargs)
        self._refuse(func, arguments)
        self._save_before_write(func, arguments)
        result = func(*args, **kwargs)
        self._append(func, args, kwargs, arguments, result)
        return result

    def undo(self) -> None:
        """Put back everything that was written outside the recording."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)

    def _refuse(self, func: OpOverload, arguments: dict[str, Any]) -> None:
        if operators.is_host_read(func) or operators.has_data_dependent_shape(func, arguments):
            raise RefusedCall(f"{func}")
        if operators.changes_memory(func, arguments):
            raise RefusedCall(f"{func} allocates")
        if operators.is_random(func, arguments):
            generator = arguments.get("generator")
            known = (torch.default_generator, *self._generators)
            if generator is not None and not any(operators.is_same_generator(generator, each) for each in known):
                raise RuntimeError(NOT_REGISTERED)

    def _save_before_write(self, func: OpOverload, arguments: dict[str, Any]) -> None:
        for tensor in operators.written_tensors(func, arguments):
            storage = storage_of(tensor)
            if storage not in self.tape.created and storage not in self._saved:
                memory = tensor.untyped_storage()
                self._saved[storage] = (memory, memory.clone())

    def _append(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: dict[str, Any], result: Any
    ) -> None:
        known = {storage_of(tensor) for tensor in operators.tensors_in(list(arguments.values()))}
        # By memory, not by schema: some operators return a view or a copy, as they must.
        created = tuple(
            (place, tensor)
            for place, tensor in enumerate(operators.tensors_in(result))
            if storage_of(tensor) not in known
        )
        for _, tensor in created:
            self.tape.created.setdefault(storage_of(tensor), tensor)
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            return
        if created or func._schema.is_mutable:
            self.tape.operations.append(_Operation(func, args, kwargs, created))


class _RefuseHostCalls(TorchFunctionMode):
    """Refuses the calls that would wait for a GPU although on the CPU they do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        verdict = named_call(func, args, kwargs or {})
        if verdict is not None:
            raise RefusedCall(verdict[1])
        return func(*args, **(kwargs or {}))
