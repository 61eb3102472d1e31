"""A cache of graphs of one module, by batch size and length: nearest bucket up, padded, valid part returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from worker.graphs.backend import backend_for
from worker.graphs.dispatcher import Dispatcher, Miss
from worker.graphs.errors import InputMismatch, ShapeNotCaptured
from worker.graphs.key import GraphKey
from worker.graphs.module_call import ModuleCall
from worker.graphs.module_runner import device_of
from worker.graphs.plan import enumerate_keys, plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.region import CaptureRegion
from worker.graphs.self_check import CheckResult, SelfCheck, Tolerance, compare
from worker.graphs.session import CaptureSession, SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAxes:
    """Which dimensions of a tensor are padded, and with what."""

    batch_dim: int | None = 0
    """None = the tensor has no batch dimension."""
    length_dim: int | None = None
    """None = the tensor has no length dimension."""
    fill: float = 0
    """An inert value: it must not change what the module computes for the valid part."""

    def sizes(self, tensor: Tensor) -> tuple[int | None, int | None]:
        """(batch, length) of a tensor."""
        batch = None if self.batch_dim is None else tensor.shape[self.batch_dim]
        return batch, None if self.length_dim is None else tensor.shape[self.length_dim]

    def tiled(self, tensor: Tensor, batch: int, length: int) -> Tensor:
        """A new tensor of these sizes, filled with repetitions of the old one's rows and positions."""
        for dim, size in ((self.batch_dim, batch), (self.length_dim, length)):
            if dim is not None:
                index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
                tensor = tensor.index_select(dim, index)
        return tensor.clone(memory_format=torch.contiguous_format)

    def narrowed(self, tensor: Tensor, batch: int, length: int) -> Tensor:
        """A view of the first `batch` rows and `length` positions."""
        if self.batch_dim is not None:
            tensor = tensor.narrow(self.batch_dim, 0, batch)
        if self.length_dim is not None:
            tensor = tensor.narrow(self.length_dim, 0, length)
        return tensor


_HALF = Tolerance(rtol=5e-2, atol=5e-2)


class BucketedGraphRunner:
    """Captures `module` for every (batch size, length) and serves any call that fits one.

    `example` names one tensor per argument, of any batch size and length; `baked` holds the arguments that are not
    tensors; `axes` says how each tensor is padded (default: rows, with zeros) and `output_axes` how the outputs are cut.
    Without `lengths` only the batch is bucketed. Weights and intermediate memory are shared by all graphs, inputs and
    outputs are not. Used by one thread.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Mapping[str, Tensor],
        *,
        baked: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
        lengths: Sequence[int] = (),
        axes: Mapping[str, PaddedAxes] | None = None,
        output_axes: PaddedAxes | None = None,
        pool: GraphPool | None = None,
        on_miss: Literal["eager", "raise"] = "eager",
        options: SessionOptions | None = None,
    ) -> None:
        self._module = module
        self._example = dict(example)
        self._baked = dict(baked or {})
        self._axes = {name: (axes or {}).get(name, PaddedAxes()) for name in example}
        self._output_axes = output_axes or PaddedAxes()
        self._on_miss = on_miss
        _check_axes(self._example, axes or {}, lengths)
        self.dispatcher = Dispatcher()
        self.session = CaptureSession(
            plan_captures(enumerate_keys(tiers=tuple(lengths) or (0,), decode_buckets=batch_sizes)),
            self._region,
            pool=pool or GraphPool(backend_for(device_of(module, ModuleCall((), example)))),
            dispatcher=self.dispatcher,
            options=options or SessionOptions(is_strict=True),
            self_check=SelfCheck(),
        )

    def capture(self, *, padding_tolerance: Tolerance | None = None) -> None:
        """Warm up, capture and check every bucket; then check that padding is inert.

        Buckets without memory are dropped, one that disagrees with eager on the same buffers, or on the same inputs
        without padding, is quarantined; a trap raises.
        """
        self.session.run()
        for key in tuple(self.session.graphs):
            result = self._check_padding(key, padding_tolerance)
            if not result.is_equal:
                self.dispatcher.quarantine(key, f"padding is not inert: {result.detail}")

    def __call__(self, **inputs: Tensor) -> Any:
        """Run the module on these inputs; the outputs belong to the caller and hold valid rows and positions only.

        A call that no bucket covers runs eagerly and is counted in `dispatcher.misses`, or raises ShapeNotCaptured.
        """
        batch, length = self._sizes(inputs)
        found = self.dispatcher.dispatch("decode", length, batch)
        if not isinstance(found, Miss):
            return self._replay(found, inputs, batch, length)
        if self._on_miss == "raise":
            raise ShapeNotCaptured(f"{found.detail}: {found.reason.value}")
        return self._eager(inputs)

    def _eager(self, inputs: Mapping[str, Tensor]) -> Any:
        with torch.no_grad():
            return self._module(**inputs, **self._baked)

    def _replay(self, key: GraphKey, inputs: Mapping[str, Tensor], batch: int, length: int) -> Any:
        graph = self.session.graphs[key]
        for name, static in graph.region.inputs.items():
            self._fill(name, static, inputs[name])
        with graph.replay() as outputs:
            return pytree.tree_map_only(
                Tensor, lambda output: self._output_axes.narrowed(output, batch, length).clone(), outputs
            )

    def _fill(self, name: str, static: Tensor, value: Tensor) -> None:
        axes = self._axes[name]
        batch, length = axes.sizes(value)
        valid = axes.narrowed(static, batch or 0, length or 0)
        if value.dtype != static.dtype or value.shape != valid.shape:
            held = f"{static.dtype} {list(static.shape)}"
            raise InputMismatch(f"{name} is {value.dtype} {list(value.shape)}, its bucket holds {held}")
        if valid.shape != static.shape:
            static.fill_(axes.fill)
        valid.copy_(value, non_blocking=True)

    def _sizes(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        """Batch size and length of a call; 0 for a length that is not bucketed."""
        if inputs.keys() != self._example.keys():
            raise InputMismatch(f"captured with arguments {sorted(self._example)}, called with {sorted(inputs)}")
        sizes = [self._axes[name].sizes(tensor) for name, tensor in inputs.items()]
        batches = {batch for batch, _ in sizes if batch is not None}
        lengths = {length for _, length in sizes if length is not None}
        if len(batches) != 1 or len(lengths) > 1:
            raise InputMismatch(f"arguments disagree: batch sizes {sorted(batches)}, lengths {sorted(lengths)}")
        return batches.pop(), lengths.pop() if lengths else 0

    def _tiled(self, batch: int, length: int) -> dict[str, Tensor]:
        """The example, repeated to these sizes."""
        return {name: self._axes[name].tiled(tensor, batch, length) for name, tensor in self._example.items()}

    def _region(self, key: GraphKey) -> CaptureRegion:
        static = self._tiled(key.bucket, key.tier)
        call = ModuleCall((), {**static, **self._baked})
        return call.region(self._module, draw=lambda generator, poison: self._draw(static, key, generator, poison))

    def _draw(self, static: Mapping[str, Tensor], key: GraphKey, generator: torch.Generator, poison: bool) -> int:
        rows = max(1, key.bucket - 1)
        for name, example in self._tiled(key.bucket, key.tier).items():
            shift = int(torch.randint(key.bucket, (), generator=generator))
            values = example
            if example.is_floating_point():
                values = torch.randn(example.shape, generator=generator).to(example)
            axes = self._axes[name]
            static[name].copy_(values if axes.batch_dim is None else values.roll(shift, axes.batch_dim))
            if axes.batch_dim is not None and poison and example.is_floating_point():
                static[name].narrow(axes.batch_dim, rows, key.bucket - rows).fill_(float("nan"))
        return rows

    def _check_padding(self, key: GraphKey, tolerance: Tolerance | None) -> CheckResult:
        batch, length = max(1, key.bucket - 1), max(1, key.tier - 1) if key.tier else 0
        inputs = self._tiled(batch, length)
        expected, actual = self._eager(inputs), self._replay(key, inputs, batch, length)
        is_half = any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            for leaf in pytree.tree_leaves(expected)
        )
        return compare(expected, actual, rows=batch, tolerance=tolerance or (_HALF if is_half else None))


def _check_axes(example: Mapping[str, Tensor], axes: Mapping[str, PaddedAxes], lengths: Sequence[int]) -> None:
    unknown = sorted(set(axes) - set(example))
    if unknown:
        raise ValueError(f"axes names {unknown}, which are not in example")
    has_length = any(axis.length_dim is not None for axis in axes.values())
    if has_length != bool(lengths):
        raise ValueError("lengths must be given exactly when an input has a length_dim")
