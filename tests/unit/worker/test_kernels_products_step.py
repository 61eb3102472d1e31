"""Whole decode steps around the tensor-core products, which nothing but a GPU can run: plain torch stands in for them.

Everything else (embedding, attention, norms, choice) runs as it is, without a GPU in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes import reference_kernels as reference
from tests.fakes.small_steps import FAMILIES, steps

LONG_WIDTHS = (72, 260)
"""Blocks of tiers in which the keys of a row are divided among programs, early and late."""


def _norm(vectors: Any, eps: float) -> torch.Tensor:
    rows, size = vectors.x.shape
    return reference.late_norm(vectors.squares, rows, size, eps)


def _rows_plain(vectors: Any, weight: Any, tile: Any, *, eps: float, bias: Any = None, out: torch.Tensor) -> None:
    y = reference.product(vectors.x, weight) * _norm(vectors, eps)
    out.copy_(y if bias is None else y + bias.float())


def _rows_gated(vectors: Any, weight: Any, tile: Any, *, eps: float, bias: Any = None, out: torch.Tensor) -> None:
    y = reference.product(vectors.x, weight) * _norm(vectors, eps)
    out.copy_(reference.gated(y if bias is None else y + bias.float()))


def _rows_logits(vectors: Any, weight: Any, tile: Any, *, eps: float, out: torch.Tensor, best: torch.Tensor) -> None:
    _rows_plain(vectors, weight, tile, eps=eps, out=out)
    torch.maximum(best, reference.ordered_keys(out).amax(-1), out=best)


def _rows_add(
    x: Any, weight: Any, tile: Any, *, bias: Any = None, residual: torch.Tensor, scale: torch.Tensor, out: Any
) -> None:
    residual += reference.product(x, weight, bias)
    out.x.copy_(residual * scale.float())
    out.squares.zero_()
    for part, own in enumerate(residual.split(tile.out, dim=1)):
        out.squares[part, : len(residual)] = own.square().sum(-1)


def _block_parts(x: Any, weight: Any, tile: Any, *, bias: Any = None, out: torch.Tensor) -> None:
    whole = reference.product(x, weight, bias)
    if len(out) == 1:
        out[0].copy_(whole)
        return
    shares = torch.softmax(torch.arange(len(out), device=x.device).float(), dim=0)
    out.copy_(whole * shares[:, None, None])


def _block_gated(x: Any, weight: Any, tile: Any, *, bias: Any = None, out: torch.Tensor) -> None:
    out.copy_(reference.gated(reference.product(x, weight, bias)))


def _block_logits(x: Any, weight: Any, tile: Any, *, out: torch.Tensor, best: torch.Tensor) -> None:
    out.copy_(reference.product(x, weight))
    torch.maximum(best, reference.ordered_keys(out).amax(-1), out=best)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rows_plain", "rows_gated", "rows_logits", "rows_add"):
        monkeypatch.setattr(f"worker.model.rows_step.{name}", globals()[f"_{name}"])
    for name in ("block_parts", "block_gated", "block_logits"):
        monkeypatch.setattr(f"worker.model.block_step.{name}", globals()[f"_{name}"])


@pytest.mark.parametrize("limit", ["product_rows", "block_rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_stay_near_single_precision_and_choose_the_largest_logit(family: str, limit: str) -> None:
    for step in steps((1, 30, 125), 2, limit=limit, **FAMILIES[family]):
        assert step.error < 3e-2
        assert torch.equal(step.ours[1][:, 0], step.ours[0].argmax(-1))
        assert step.ours[1][:, 1].all()


@pytest.mark.parametrize("width", LONG_WIDTHS)
@pytest.mark.parametrize("limit", ["product_rows", "block_rows"])
def test_long_tiers_divide_the_keys_of_a_row(limit: str, width: int) -> None:
    for step in steps((280, 3, 257), 2, limit=limit, width=width, max_position_embeddings=2048):
        assert step.error < 3e-2


@pytest.mark.parametrize("limit", ["product_rows", "block_rows"])
def test_a_step_in_float16(limit: str) -> None:
    (step,) = steps((5, 64, 2), dtype=torch.float16, limit=limit, num_layers=2)
    assert step.error < 5e-3
