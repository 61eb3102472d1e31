"""What a pool is scaled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Objectives and bounds of one pool."""

    min_replicas: int = 1
    """Never fewer; 0 lets an idle pool go, and a held request brings it back."""
    max_replicas: int = 8
    """Never more."""
    target_ttft_s: float = 1.0
    """A short prompt that comes now should have its first token after this; while it would not, replicas are added."""
    target_token_s: float | None = None
    """Time between two tokens of an answer. None = rows are filled whatever a step then takes."""
    target_occupancy: float = 0.7
    """Part of the rows (that the objective for tokens leaves) in use when the pool has the right size."""
    decide_every_s: float = 1.0
    """Between two looks at the routers."""
    down_after_s: float = 300.0
    """Replicas are taken away once fewer have sufficed for this long. Longer than load varies by itself."""
    to_zero_after_s: float = 600.0
    """The last replica goes after this long without any request; needs min_replicas 0."""
    replica_start_s: float = 60.0
    """A replica that is asked for is counted on for this long before it is ready."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, must be in [0, max_replicas = {self.max_replicas}]")
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas is {self.max_replicas}, must be at least 1")
        if not 0 < self.target_occupancy <= 1:
            raise ValueError(f"target_occupancy is {self.target_occupancy}, must be in (0, 1]")
        for name in ("target_ttft_s", "decide_every_s", "down_after_s", "to_zero_after_s", "replica_start_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if self.target_token_s is not None and not self.target_token_s > 0:
            raise ValueError(f"target_token_s is {self.target_token_s}, must be positive")
