"""Runs Triton kernels on the CPU, where there is no GPU. Import before any kernel is imported.

`tests/conftest.py` turns the interpreter on. Triton 3.6's interpreter converts arrays of one element in a way that
NumPy 2.4 no longer allows, and multiplies the bit patterns of bfloat16 numbers; both are put right here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
    product = np.matmul(_as_numbers(a), _as_numbers(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def _as_numbers(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


if IS_INTERPRETED:
    _original_patch = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter.InterpreterBuilder.create_dot = _dot
