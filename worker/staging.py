"""Static input tensors of a step, and the host memory they are filled from."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Staging:
    """Named fixed-address tensors that live in one buffer, so that a step uploads all of them in one copy.

    `host[name]` is a numpy array to write; `device[name]` is the tensor the model reads. On the CPU both are the same
    memory and `upload` does nothing.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        offsets, total = _layout(spec)
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device) if is_cuda else self._host
        self.device = {name: _view(self._device, offsets[name], *spec[name]) for name in spec}
        self.host: dict[str, npt.NDArray[np.generic]] = {
            name: _view(self._host, offsets[name], *spec[name]).numpy() for name in spec
        }

    def upload(self) -> None:
        """Queue one asynchronous copy to the device; the host arrays must stay as they are until it has run."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


def _layout(spec: Spec) -> tuple[dict[str, int], int]:
    offsets, total = {}, 0
    for name, (shape, dtype) in spec.items():
        offsets[name] = total
        total += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, total


def _view(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
