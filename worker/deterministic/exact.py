"""The small operations of a decoder on the CPU, out of steps that round alike wherever a number lies.

Vectorised loops finish with scalar code, and sums are cut by size and thread: torch's sigmoid, silu and sum differ in the
last bit from place to place. Addition, multiplication, division, square root and torch's exp do not.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def fixed_sum(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 1]: halves are added until one number is left, in an order that n alone decides."""
    size = x.shape[-1]
    while size > 1:
        half = 1 << ((size - 1).bit_length() - 1)
        upper = x[..., half:]
        x = x[..., :half] + (upper if size == 2 * half else functional.pad(upper, (0, 2 * half - size)))
        size = half
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] normed and scaled by `weight` [n]."""
    mean = fixed_sum(x * x) / x.shape[-1]
    return x / (mean + eps).sqrt() * weight


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * size], gates first -> silu(gate) * up [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (gate.neg().exp_() + 1) * up


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] turned by angles whose cosines and sines are [tokens, 1, head_dim / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
