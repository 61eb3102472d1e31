"""Linear layers for the few rows of a serving step."""

from __future__ import annotations

import torch
from torch.nn import functional

MAX_TRANSPOSED_ROWS = 64
"""From here on the CPU's ordinary order of operands is as fast."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]; the way to the product depends on shapes and device alone.

    On the CPU a handful of rows is computed as weight @ x.T, with a single row doubled: MKL then streams the weights
    at memory speed, where its matrix-vector and thin matrix-matrix kernels reach a third of it.
    """
    rows = x.shape[0]
    if x.device.type != "cpu" or rows > MAX_TRANSPOSED_ROWS or x.dtype != torch.float32:
        return functional.linear(x, weight, bias)
    columns = x if rows > 1 else x.repeat(2, 1)
    out = torch.mm(weight, columns.t())[:, :rows].t().contiguous()
    return out if bias is None else out.add_(bias)
