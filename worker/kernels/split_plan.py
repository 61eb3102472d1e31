"""How the keys of a decode step are divided among programs. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from worker.kernels.device import power_of_two

_TILE_ELEMENTS = 8192
"""Numbers of one tile of keys in half precision: 128 tokens of 64."""
_SHORT = 256
"""In tiers up to this many tokens a tile holds half as many: less of the last one is empty."""
_MIN_CHUNK = 256
"""Tokens that one program reads before a second one pays for merging their results."""
_PROGRAMS_AN_SM = 2
_WIDE = 1024
_WIDE_SPLITS = 4
"""However many rows there are, the last tier's one long row is not left to a single program a head."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """One launch: at most `num_splits` programs for each row and KV head, which share the row's live tokens evenly."""

    num_splits: int
    min_chunk: int
    """Tokens a program takes at least; a multiple of `tile`."""
    tile: int
    """Tokens read at a time."""
    num_warps: int
    num_stages: int


def split_plan(
    *, rows: int, num_kv_heads: int, head_dim: int, width: int, num_sms: int, itemsize: int = 2
) -> SplitPlan:
    """The plan for `rows` rows whose block tables hold up to `width` tokens.

    The split of a row depends on its own length and on num_splits, never on the lengths of other rows.
    """
    elements = _TILE_ELEMENTS // 2 if width <= _SHORT else _TILE_ELEMENTS
    tile = max(elements * 2 // (power_of_two(head_dim) * itemsize), 16)
    return SplitPlan(
        num_splits=_num_splits(rows * num_kv_heads, width, num_sms),
        min_chunk=max(_MIN_CHUNK, tile),
        tile=tile,
        num_warps=4,
        num_stages=2,
    )


def max_partials(*, max_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """The most programs that leave a partial result, over all plans of up to `max_rows` rows."""
    return max(_PROGRAMS_AN_SM * num_sms, max_rows * num_kv_heads * _WIDE_SPLITS)


def _num_splits(programs: int, width: int, num_sms: int) -> int:
    useful = -(-width // _MIN_CHUNK)
    for_long_rows = min(_WIDE_SPLITS, -(-width // _WIDE))
    return min(max(_PROGRAMS_AN_SM * num_sms // programs, for_long_rows, 1), useful)
