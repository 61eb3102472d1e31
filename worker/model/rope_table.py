"""Cosines and sines of every position, computed in float32 operation by operation as `transformers` does.

Rounding matters: a frequency that is off by one unit in the last place turns position 8192 by 0.0005 radians.
"""

from __future__ import annotations

import math

import torch

from worker.model.architecture import DecoderConfig
from worker.model.rope import RopeConfig


def rope_table(config: DecoderConfig) -> torch.Tensor:
    """[max_position_embeddings, head_dim] float32: cosines, then sines, of every position's angles."""
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(config.rope.attention_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each turned pair."""
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return (1.0 / wavelengths) / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_dim)
    return 1.0 / wavelengths


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow pairs are slowed further by the factor, fast ones kept, those between interpolated."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - low) / (high - low)
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    slow, fast = wavelengths > context / low, wavelengths < context / high
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, between))


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The same idea with a straight ramp over the pairs, between two numbers of turns over the original context."""

    def border(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return (head_dim * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = border(rope.beta_fast), border(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return (1.0 / (rope.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
