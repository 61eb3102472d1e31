"""Flips bits of a served model's memory on purpose. Made only for a worker that allows faults."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from worker.constants import Constant, constants_of


class BitFlips:
    """See worker.faults.FlipBit. A flip happens between two steps, or at once when nothing runs."""

    def __init__(self, module: nn.Module, between_steps: Callable[[Callable[[], None]], None]) -> None:
        """`between_steps` calls what it is given on the engine's thread."""
        self._constants = {one.name: one for one in constants_of(module)}
        self._between_steps = between_steps

    def __call__(self, tensor: str, bit: int) -> None:
        """Raises ValueError for a tensor or a bit that does not exist; nothing happens then."""
        constant = self._constants.get(tensor)
        if constant is None:
            raise ValueError(f"tensor {tensor[:80]!r} is none of {', '.join(list(self._constants)[:8])}, ...")
        if not 0 <= bit < 8 * constant.nbytes:
            raise ValueError(f"bit {bit} is outside of {tensor}, which has {8 * constant.nbytes}")
        self._between_steps(lambda: flip_bit(constant, bit))


@torch.inference_mode()
def flip_bit(constant: Constant, bit: int) -> None:
    """Turn over one bit, counted from the first byte, as a fault of the memory would: torch counts no write."""
    octets = constant.words.data.view(torch.uint8)  # `data` has a count of its own
    octets[bit // 8 : bit // 8 + 1].bitwise_xor_(1 << bit % 8)
