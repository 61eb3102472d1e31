"""Outputs of a replay, readable only until the memory is used again; reading too late raises."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from worker.graphs.backend import CaptureBackend
from worker.graphs.errors import OutputOverwritten
from worker.graphs.region import storage_of


class OutputEpoch:
    """Counts the replays over one piece of graph memory, and orders them after whoever still reads it.

    Graphs that share a pool share an epoch. Never replay two of them at once; from different streams they are put in order.
    """

    def __init__(self, backend: CaptureBackend) -> None:
        self.value = 0
        self._backend = backend
        self._open: ReplayLease | None = None
        self._stream: Hashable = None
        self._readers: set[Hashable] = set()

    def advance(self, key: str) -> None:
        """A replay is about to use the memory. Raises OutputOverwritten while a lease is open."""
        if self._open is not None:
            raise OutputOverwritten(f"replayed while outputs of {self._open.key} are being read", key=key)
        stream = self._backend.current_stream()
        for earlier in self._readers | ({self._stream} if self.value else set()):
            self._order_after(earlier, stream)
        self._readers.clear()
        self._stream = stream
        self.value += 1

    def open(self, lease: ReplayLease) -> None:
        """`lease` reads until `close`."""
        self._open = lease
        self.join()

    def close(self) -> None:
        """Whatever was launched on the current stream so far reads the outputs; the next replay comes after it."""
        self._open = None
        self.note_reader()

    def join(self) -> None:
        """Order the current stream after the last replay."""
        self._order_after(self._stream, self._backend.current_stream())

    def note_reader(self) -> None:
        """The current stream holds work that reads the outputs."""
        self._readers.add(self._backend.current_stream())

    def _order_after(self, earlier: Hashable, stream: Hashable) -> None:
        if earlier is not None and earlier != stream:
            self._backend.wait_for(earlier)


class ReplayLease:
    """The outputs of one replay.

    Either `with graph.replay() as outputs:` - no graph of the pool can be replayed inside, and the outputs are dead after
    it - or `graph.replay().clone()` for tensors of one's own. `outputs` outside a with-block is valid until the next
    replay of the pool. Any torch operation on an output, or on a view of one, after its time raises OutputOverwritten.
    """

    def __init__(self, key: str, epoch: OutputEpoch, outputs: Any) -> None:
        self.key = key
        self._epoch = epoch
        self._outputs = outputs
        self._generation = epoch.value
        self._is_closed = False

    def check(self) -> None:
        """Raise OutputOverwritten if the outputs are not readable any more."""
        if self._is_closed:
            raise OutputOverwritten("an output was read after its with-block", key=self.key)
        if self._epoch.value != self._generation:
            late = self._epoch.value - self._generation
            raise OutputOverwritten(f"an output was read {late} replay(s) too late", key=self.key)

    @property
    def outputs(self) -> Any:
        """The outputs, guarded. Work on them must be launched on the stream that is current now."""
        self.check()
        self._epoch.join()
        self._epoch.note_reader()
        return self._map(lambda output: LeasedTensor.over(output, self))

    def clone(self) -> Any:
        """Copies of the outputs, launched on the current stream; they belong to the caller."""
        self.check()
        self._epoch.join()
        copies = self._map(lambda output: output.detach().clone())
        self._epoch.note_reader()
        return copies

    def copy_to(self, targets: Iterable[Tensor], *, non_blocking: bool = False) -> None:
        """Copy the outputs, in order, into tensors of the caller, launched on the current stream."""
        self.check()
        self._epoch.join()
        leaves = [leaf for leaf in pytree.tree_leaves(self._outputs) if isinstance(leaf, Tensor)]
        for target, output in zip(targets, leaves, strict=True):
            target.copy_(output, non_blocking=non_blocking)
        self._epoch.note_reader()

    def __enter__(self) -> Any:
        outputs = self.outputs
        self._epoch.open(self)
        return outputs

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_closed = True
        self._epoch.close()

    def _map(self, function: Callable[[Tensor], Tensor]) -> Any:
        outputs = self._outputs
        if isinstance(outputs, Tensor):
            return function(outputs)
        if type(outputs) is tuple and all(isinstance(output, Tensor) for output in outputs):
            return tuple(map(function, outputs))  # most regions: not worth a walk through a tree
        return pytree.tree_map_only(Tensor, function, outputs)


class LeasedTensor(Tensor):
    """A tensor whose every use first checks its lease. Views of it are leased too; computed results are ordinary."""

    lease: ReplayLease

    @classmethod
    def over(cls, tensor: Tensor, lease: ReplayLease) -> Self:
        """The same memory under a lease."""
        leased = tensor.detach().as_subclass(cls)
        leased.lease = lease
        return leased

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ALWAYS_ALLOWED:
                return func(*args, **kwargs)
            leased = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LeasedTensor)]
            for tensor in leased:
                tensor.lease.check()
            if func in _EXPORTS:
                args = (args[0].clone(), *args[1:])
            leases = {storage_of(tensor): tensor.lease for tensor in leased}
            return pytree.tree_map_only(Tensor, lambda result: _under_lease(result, leases), func(*args, **kwargs))


def _under_lease(result: Tensor, leases: dict[int, ReplayLease]) -> Tensor:
    if isinstance(result, LeasedTensor) or result.layout is not torch.strided:
        return result
    lease = leases.get(storage_of(result))
    return result if lease is None else LeasedTensor.over(result, lease)


_METADATA = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
_ALWAYS_ALLOWED = frozenset(
    {getattr(Tensor, name).__get__ for name in _METADATA}
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size}
)
"""Questions about the tensor that do not look at its memory."""
_EXPORTS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Calls whose result shares the memory out of our sight: they get a copy."""
