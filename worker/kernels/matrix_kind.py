"""The matrices that a decode step multiplies with."""

from __future__ import annotations

from typing import Literal

MatrixKind = Literal["qkv", "o", "gate_up", "down", "head"]
"""Of a decoder. "gate_up" counts its outputs once, and two rows of weights belong to each."""
