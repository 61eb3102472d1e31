"""Graph capture by hand, for any nn.Module: warm up, capture, replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.graphs.backend import CaptureBackend, backend_for
from worker.graphs.captured import CapturedGraph
from worker.graphs.errors import MissingWarmUp, ShapeNotCaptured
from worker.graphs.key import GraphKey
from worker.graphs.lanes import CopyMode, InputLane
from worker.graphs.lease import ReplayLease
from worker.graphs.module_call import ModuleCall
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import WARMUP_STEPS, GraphRecorder

SampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""One tensor, positional arguments, or arguments by name."""

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class _WarmShape:
    """A module that was warmed up at one shape, and how its region is built."""

    key: GraphKey
    module: nn.Module
    options: dict[str, Any]


class CUDAGraphRunner:
    """Captures one module at one shape and replays it.

        runner = CUDAGraphRunner()
        runner.warmup(module, x)
        runner.capture(module, x)
        with runner.replay(new_x) as output:
            use(output)

    `use_pool` and `max_pool_bytes` are those of GraphPool; pass `pool` to share one with other runners of the same
    thread. `copy` chooses the stream for the input copy. `check_addresses` looks, before every replay, whether a weight
    has been replaced (tens of microseconds for hundreds of weights). On a machine without a GPU the capture is emulated.
    """

    def __init__(
        self,
        *,
        use_pool: bool = True,
        max_pool_bytes: int | None = None,
        pool: GraphPool | None = None,
        backend: CaptureBackend | None = None,
        copy: CopyMode = "same_stream",
        check_addresses: bool = True,
    ) -> None:
        self._use_pool = use_pool
        self._max_pool_bytes = max_pool_bytes
        self._pool = pool
        self._backend = backend
        self._copy: CopyMode = copy
        self._checks_addresses = check_addresses
        self._recorder: GraphRecorder | None = None
        self._lane: InputLane | None = None
        self._warm: dict[tuple[Any, ...], _WarmShape] = {}
        self._call: ModuleCall | None = None
        self._graph: CapturedGraph | None = None

    @property
    def graph(self) -> CapturedGraph:
        """The captured graph. Raises ShapeNotCaptured before `capture`."""
        if self._graph is None:
            raise ShapeNotCaptured("nothing was captured yet")
        return self._graph

    def warmup(
        self,
        module: nn.Module,
        sample_inputs: SampleInputs,
        num_steps: int = WARMUP_STEPS,
        *,
        reset: Callable[[], object] | None = None,
        state: Mapping[str, Tensor] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        """Run the module on a side stream, without autograd, and look for traps in the first step.

        `reset` is called afterwards and puts back what the module has changed, such as a cache; tensors in `state` are
        saved and put back. Random operators need their generator in `generators`. Raises the CaptureError found.
        """
        if num_steps < WARMUP_STEPS:
            raise ValueError(f"num_steps must be at least {WARMUP_STEPS}, got {num_steps}")
        call = call_of(sample_inputs)
        key = GraphKey("decode", 0, _batch_of(call), f"{type(module).__name__}.{next(_NUMBERS)}")
        options: dict[str, Any] = {"reset": reset, "state": dict(state or {}), "generators": tuple(generators)}
        region = call.as_static().region(module, **options)
        self._recorder_for(module, call).warm_up(key, region, num_steps=num_steps)
        self._warm[id(module), *call.signature] = _WarmShape(key, module, options)

    def capture(
        self, module: nn.Module, sample_inputs: SampleInputs, static_inputs: SampleInputs | None = None
    ) -> CapturedGraph:
        """Record the module on static buffers: `static_inputs`, or clones of the samples.

        The module must have been warmed up at these shapes, else MissingWarmUp. A graph captured before is released.
        """
        call = call_of(sample_inputs)
        warm = self._warm.get((id(module), *call.signature))
        if warm is None or self._recorder is None:
            raise MissingWarmUp(f"{type(module).__name__} was not warmed up with these shapes")
        self.close()
        self._call = call.as_static(None if static_inputs is None else call_of(static_inputs).tensors)
        self._graph = self._recorder.capture(warm.key, self._call.region(module, **warm.options))
        return self._graph

    def replay(self, *inputs: Any, **named: Any) -> ReplayLease:
        """Copy the inputs in, launch, and return the protected outputs. The host waits for nothing.

        Called as the module would be. Raises InputMismatch, with expected and actual, unless shapes, dtypes and all
        values that are not tensors are those of the capture; AddressChanged if a weight was replaced.
        """
        graph = self.graph
        assert self._call is not None, "a graph exists, so its call does"
        values = self._call.match(inputs, named, str(graph.key))
        if self._checks_addresses:
            graph.verify_addresses()
        graph.load(values, self._lane)
        return graph.replay()

    def close(self) -> None:
        """Release the graph and its memory."""
        if self._graph is not None and self._recorder is not None:
            self._recorder.release(self._graph)
        self._graph = None

    def _recorder_for(self, module: nn.Module, call: ModuleCall) -> GraphRecorder:
        if self._recorder is None:
            device = device_of(module, call)
            pool = self._pool or GraphPool(
                self._backend or backend_for(device), use_pool=self._use_pool, max_bytes=self._max_pool_bytes
            )
            self._recorder = GraphRecorder(pool)
            self._lane = InputLane(device, self._copy)
        return self._recorder


def call_of(inputs: SampleInputs) -> ModuleCall:
    """The call that these inputs stand for."""
    if isinstance(inputs, Tensor):
        return ModuleCall((inputs,))
    if isinstance(inputs, Mapping):
        return ModuleCall((), inputs)
    return ModuleCall(tuple(inputs))


def device_of(module: nn.Module, call: ModuleCall) -> torch.device:
    """Where the module's weights are, or else its first input."""
    tensors = itertools.chain(module.parameters(), module.buffers(), call.tensors.values())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _batch_of(call: ModuleCall) -> int:
    return max((tensor.shape[0] for tensor in call.tensors.values() if tensor.dim()), default=1) or 1
