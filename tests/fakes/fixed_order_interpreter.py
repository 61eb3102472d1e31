"""What tests of the fixed-order kernels need of Triton's interpreter. Imported fixtures hold for the importing module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from tests.fakes.triton_interpreter import IS_INTERPRETED, _as_numbers
from worker.kernels import fixed_order_attention


@pytest.fixture(autouse=True)
def products_like_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen products at a time are added to a sum, which is rounded then; NumPy's own products round by shape."""

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        left, right = _as_numbers(a).astype(np.float64), _as_numbers(b).astype(np.float64)
        total = acc.data
        for k in range(0, left.shape[1], 16):
            total = (total + np.matmul(left[:, k : k + 16], right[k : k + 16])).astype(acc.data.dtype)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    if IS_INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits and tiles so short that a few dozen tokens take several."""
    monkeypatch.setattr(fixed_order_attention, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(fixed_order_attention, "_TILE_ELEMENTS", 512)
