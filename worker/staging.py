"""Static input tensors of a step, and the host memory they are filled from."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
HostArrays = dict[str, npt.NDArray[np.generic]]


class Staging:
    """Named fixed-address tensors that live in one buffer, so that a step uploads all of them in one copy.

    `device[name]` is the tensor the model reads, `writable()[name]` the numpy array it is filled from. On the CPU both
    are the same memory and `upload` does nothing.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        offsets, total = _layout(spec)
        self._is_cuda = device.type == "cuda"
        self._host_buffer = torch.zeros(total, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._device_buffer = (
            torch.zeros(total, dtype=torch.uint8, device=device) if self._is_cuda else self._host_buffer
        )
        self._uploaded: torch.cuda.Event | None = None
        self.device = {name: _view(self._device_buffer, offsets[name], *spec[name]) for name in spec}
        self._host: HostArrays = {name: _view(self._host_buffer, offsets[name], *spec[name]).numpy() for name in spec}

    def writable(self) -> HostArrays:
        """The host arrays, once the last upload has left them; waits for that one copy only."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        return self._host

    def upload(self) -> None:
        """Queue one asynchronous copy to the device on the current stream."""
        if not self._is_cuda:
            return
        self._device_buffer.copy_(self._host_buffer, non_blocking=True)
        if self._uploaded is None:
            self._uploaded = torch.cuda.Event()
        self._uploaded.record()


def _layout(spec: Spec) -> tuple[dict[str, int], int]:
    offsets, total = {}, 0
    for name, (shape, dtype) in spec.items():
        offsets[name] = total
        total += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, total


def _view(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
