"""The name of a graph: every Python number that reaches a kernel is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["prefill", "decode", "sample"]


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """One captured shape. Two calls may share a graph only if their keys are equal."""

    phase: Phase
    tier: int
    """Sequence-length class, in tokens; 0 where the length does not matter."""
    bucket: int
    """Rows of the batch (decode, sample) or tokens of the chunk (prefill)."""
    variant: str = "default"
    """Everything else that is baked in: greedy or sampling, deterministic or fast, ..."""

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise ValueError(f"phase must be one of {get_args(Phase)}, got {self.phase!r}")
        if self.tier < 0:
            raise ValueError(f"tier must not be negative, got {self.tier}")
        if self.bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {self.bucket}")
        if not self.variant:
            raise ValueError("variant must not be empty")

    def __str__(self) -> str:
        return f"{self.phase}/t{self.tier}/b{self.bucket}/{self.variant}"
