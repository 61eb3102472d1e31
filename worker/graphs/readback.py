"""Outputs on their way to the host: copied without waiting, readable once their event has passed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from worker.graphs.errors import OutputOverwritten
from worker.graphs.lease import ReplayLease


class HostReadback:
    """A ring of pinned host buffers for the outputs of one graph.

    `depth` copies may be under way at once; a copy's result is gone once `depth` later ones were started.
    """

    def __init__(self, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._depth = depth
        self._rings: list[list[Tensor]] = []
        self._started = 0

    def start(self, lease: ReplayLease) -> PendingRead:
        """Queue the copy of a lease's outputs behind its replay, on the current stream. Returns at once."""
        outputs = lease.outputs
        leaves, spec = pytree.tree_flatten(outputs)
        buffers = self._buffers([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        lease.copy_to(buffers, non_blocking=True)
        landed = None
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            landed = torch.cuda.Event()
            landed.record()
        filled = iter(buffers)
        host = [next(filled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._started += 1
        return PendingRead(self, self._started, pytree.tree_unflatten(host, spec), landed)

    def is_overwritten(self, number: int) -> bool:
        """Whether the buffers of the `number`-th copy are in use again."""
        return self._started - number >= self._depth

    def _buffers(self, like: list[Tensor]) -> list[Tensor]:
        if len(self._rings) < self._depth:
            self._rings.append([_host_buffer(tensor) for tensor in like])
            return self._rings[-1]
        ring = self._rings[self._started % self._depth]
        for buffer, tensor in zip(ring, like, strict=True):
            if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                raise ValueError(f"this ring holds {list(buffer.shape)} {buffer.dtype}, got {list(tensor.shape)}")
        return ring


class PendingRead:
    """One copy that may still be under way."""

    def __init__(self, ring: HostReadback, number: int, host: Any, landed: torch.cuda.Event | None) -> None:
        self._ring = ring
        self._number = number
        self._host = host
        self._landed = landed

    def is_ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._landed is None or self._landed.query()

    def result(self) -> Any:
        """The outputs on the host; waits for this copy only. Raises OutputOverwritten when asked too late."""
        if self._ring.is_overwritten(self._number):
            raise OutputOverwritten("a host copy was read after its buffer was used again")
        if self._landed is not None:
            self._landed.synchronize()
        return self._host


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
