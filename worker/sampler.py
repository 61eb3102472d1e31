"""From logits to token ids, batched, with every number of a request in its own row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

CANDIDATES = 1024
"""Tokens sorted first for top-p; a row that needs more is sorted whole."""

Rows = Mapping[str, torch.Tensor]
"""temperature, top_p, min_p, uniform float32 and top_k int64, each [rows]."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] -> [rows] int64; equal logits go to the lowest id."""
    return logits.argmax(dim=-1)


def sample(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Draw one token a row: [rows, vocab] float32 -> [rows] int64. Rows of temperature 0 are greedy.

    The tokens that top-k, top-p and min-p keep are those at or above a threshold, so the outcome does not depend on
    any sorting order, and the draw inverts the cumulative distribution in id order.
    """
    temperature = rows["temperature"]
    is_random = temperature > 0
    scaled = logits / torch.where(is_random, temperature, 1.0)[:, None]
    if _filters(rows):
        scaled = scaled.masked_fill(scaled < _thresholds(scaled, rows)[:, None], -torch.inf)
    # Float64, since a float32 running sum over a large vocabulary moves the tail by more than its own probability.
    cumulative = torch.softmax(scaled, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = rows["uniform"].to(torch.float64)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return torch.where(is_random, drawn.clamp_(max=logits.shape[-1] - 1), greedy(logits))


def _filters(rows: Rows) -> bool:
    return bool((rows["top_k"] > 0).any() or (rows["top_p"] < 1).any() or (rows["min_p"] > 0).any())


def _thresholds(scaled: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The smallest scaled logit each row keeps: [rows]. Top-k first, top-p over what it leaves, then min-p."""
    width = scaled.shape[-1]
    count = min(CANDIDATES, width)
    if int(rows["top_k"].max()) > count:
        count = width
    ordered = scaled.topk(count, dim=-1).values
    lowest = _top_p_threshold(ordered, scaled, rows)
    if lowest is None:
        ordered = scaled.sort(dim=-1, descending=True).values
        lowest = _top_p_threshold(ordered, scaled, rows)
        assert lowest is not None
    min_p = ordered[:, 0] + torch.log(rows["min_p"])
    return torch.maximum(lowest, min_p)


def _top_p_threshold(ordered: torch.Tensor, scaled: torch.Tensor, rows: Rows) -> torch.Tensor | None:
    """As `_thresholds`, without min-p; None when `ordered` holds too few of the largest logits to tell."""
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    limits = torch.where(rows["top_k"] > 0, rows["top_k"], scaled.shape[-1])[:, None]
    kept = ordered.masked_fill(places >= limits, -torch.inf)
    mass = torch.where(
        limits <= ordered.shape[-1], kept.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True)
    )
    before = (kept - mass).exp().cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    top_p = rows["top_p"][:, None]
    wanted = ((before < top_p) | (top_p >= 1)) & (places < limits)
    last = wanted.sum(dim=-1, keepdim=True) - 1
    is_cut_off = (last == ordered.shape[-1] - 1).squeeze(-1) & (limits.squeeze(-1) > ordered.shape[-1])
    unlimited = is_cut_off & (rows["top_p"] >= 1)
    if bool((is_cut_off & ~unlimited).any()) and ordered.shape[-1] < scaled.shape[-1]:
        return None
    lowest = kept.gather(-1, last).squeeze(-1)
    return torch.where(unlimited, -torch.inf, lowest)
