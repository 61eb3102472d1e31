"""The memory that a model reads in every step and nobody writes: its weights, and tables such as that of its angles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

log = logging.getLogger(__name__)

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""By what divides a tensor's bytes."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One tensor of a model."""

    name: str
    words: torch.Tensor
    """All of its bytes, as integers in one dimension."""
    version: int | None
    """Of a buffer, when it was loaded: torch counts its own writes. None = a weight, which nothing may write."""

    @property
    def is_changed_on_purpose(self) -> bool:
        """Whether torch has written it since it was loaded: then it was never one."""
        return self.version is not None and self.words._version != self.version

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.words.nbytes

    def pieces(self, max_words: int) -> Iterator[torch.Tensor]:
        """Its words in order, so many at a time."""
        yield from self.words.split(max_words)


def constants_of(module: nn.Module) -> list[Constant]:
    """Each parameter and buffer of `module` once, however many names or views it has.

    Buffers of which torch does not count the writes are left out, since those may be meant; so is what has gaps, and
    what is not on the first weight's device.
    """
    found: dict[tuple[int, int], Constant] = {}
    device: torch.device | None = None
    for name, tensor, is_weight in _tensors(module):
        device = device or tensor.device
        words = _words(tensor)
        if words is None or tensor.device != device or (not is_weight and tensor.is_inference()):
            log.warning("%s is not watched for changes", name)
        elif len(words):
            place = (words.data_ptr(), words.nbytes)
            found.setdefault(place, Constant(name, words, None if is_weight else words._version))
    return list(found.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Weights first: what is both is a weight."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach(), True
    for name, buffer in module.named_buffers():
        yield name, buffer, False


def _words(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of all its bytes; None where elements do not lie side by side."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if tensor.layout is not torch.strided or not dense.is_contiguous():
        return None
    step = next(size for size in _WORDS if not (tensor.nbytes | tensor.data_ptr()) % size)
    return dense.view(-1).view(_WORDS[step])
