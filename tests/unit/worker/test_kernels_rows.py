"""Kernels that work row by row, against plain torch. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import reference_kernels as reference
from tests.fakes.triton_interpreter import DEVICE
from worker.kernels.rms_norm import rms_norm
from worker.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 576, 2048])
def test_norm_equals_torch(hidden: int, dtype: torch.dtype) -> None:
    x, weight = rows(3, hidden, dtype=dtype), rows(hidden, dtype=dtype, seed=1)

    normed = rms_norm(x, weight, 1e-5)

    torch.testing.assert_close(
        normed, reference.rms_norm(x, weight, 1e-5), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum_leaves_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    x, weight = rows(2, 576, dtype=dtype), rows(576, dtype=dtype, seed=1)
    residual, expected_residual = (rows(2, 576, dtype=dtype, seed=2) for _ in range(2))

    normed = rms_norm(x, weight, 1e-5, residual=residual)
    expected = reference.rms_norm(x, weight, 1e-5, residual=expected_residual)

    torch.testing.assert_close(residual, expected_residual, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(normed, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_norm_of_zeros_is_finite() -> None:
    weight = rows(64, dtype=torch.float32)
    assert rms_norm(torch.zeros(1, 64, device=DEVICE), weight, 1e-6).abs().max() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1536])
def test_gated_activation_equals_torch(size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * rows(3, 2 * size, dtype=dtype)

    torch.testing.assert_close(
        silu_mul(gate_up), reference.silu_mul(gate_up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
