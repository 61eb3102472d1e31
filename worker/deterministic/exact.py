"""The small operations of a decoder on the CPU, out of steps that round alike wherever a number lies.

Vectorised loops finish with scalar code, and sums are cut by size and thread: torch's sigmoid, silu and sum differ in the
last bit from place to place. Addition, multiplication, division, square root and torch's exp do not.
"""

from __future__ import annotations

import torch


def fixed_sum(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 1]: halves are added until one number is left, in an order that n alone decides."""
    size = x.shape[-1]
    half = 1 << max(size - 1, 0).bit_length() >> 1
    if half < size < 2 * half:
        # What is over is added to the first numbers, so that a power of two is left.
        x = torch.cat((x[..., : size - half] + x[..., half:], x[..., size - half : half]), dim=-1)
        half >>= 1
    while half:
        x = x[..., :half] + x[..., half:]
        half >>= 1
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
