"""Memory in which the programs of one row leave partial results for the last of them to merge."""

from __future__ import annotations

import torch

from worker.kernels.device import num_sms
from worker.kernels.split_plan import max_partials


class DecodeWorkspace:
    """Allocated once for all plans of up to `max_rows` rows. Launches that use it must follow each other on one stream."""

    def __init__(
        self, *, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        partials = max_partials(max_rows=max_rows, num_kv_heads=num_kv_heads, num_sms=num_sms(device))
        partials *= num_heads // num_kv_heads
        self.sums = torch.empty(partials, head_dim, dtype=torch.float32, device=device)
        """Unnormalised sums of values, one row a query head and split."""
        self.stats = torch.empty(partials, 2, dtype=torch.float32, device=device)
        """The largest score, base 2, and the sum of weights."""
        self.arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        """Programs that have left their result; zero between launches."""
