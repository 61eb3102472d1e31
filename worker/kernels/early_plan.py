"""How keys are divided among programs when their partial results are merged by the kernel after. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from worker.kernels.device import power_of_two

LATE_SPLITS = 8
"""Partial results of a head that the output projection may have to merge; beyond, the attention merges them itself."""
_TILE_ELEMENTS = 8192
"""Keys of one tile that are requested before the wait, in numbers; as many values come with them."""
_MAX_TILE = 64
SHORT_TIER = 256
"""Up to so many tokens one program a row and head is enough."""
_LONG_CHUNK = 256
_WHOLE_ROWS_AN_SM = 4
"""Programs that hold a whole row of a short tier, with small heads: more of them had better hold less and be many."""
_SMALL_HEAD = 64
_NUMBERS_A_WARP = 4096
"""Keys of a tile that one warp holds in registers."""
_PROGRAMS_AN_SM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyPlan:
    """One launch: at most `num_splits` programs for each row and KV head."""

    num_splits: int
    late_splits: int
    """Up to so many partial results are left for the output projection."""
    min_chunk: int
    """Tokens of one program as long as late_splits programs of `long_chunk` tokens are enough; a multiple of `tile`."""
    long_chunk: int
    """The least tokens of one program for longer rows."""
    tile: int
    """Tokens read at a time, a power of two."""
    num_warps: int = 4


def early_plan(*, rows: int, num_kv_heads: int, head_dim: int, width: int, num_sms: int) -> EarlyPlan:
    """The plan for `rows` rows whose block tables hold up to `width` tokens.

    The split of a row depends on its own length and on num_splits, never on the lengths of other rows.
    """
    tile = min(max(_TILE_ELEMENTS // power_of_two(head_dim), 16), _MAX_TILE)
    late = min(LATE_SPLITS, -(-width // tile))
    wide = min(-(-width // _LONG_CHUNK), _PROGRAMS_AN_SM * num_sms // (rows * num_kv_heads))
    return EarlyPlan(
        num_splits=max(late, wide if width > LATE_SPLITS * _LONG_CHUNK else 0),
        late_splits=late,
        min_chunk=tile,
        long_chunk=_LONG_CHUNK,
        tile=tile,
    )


def rows_plan(
    *, rows: int, num_kv_heads: int, head_dim: int, width: int, num_sms: int, spare_shared: bool
) -> EarlyPlan:
    """The same where one result a head must come out: what several programs have found is merged by the last of them.

    In short tiers one program takes all tokens of a row, and asks for them before the wait where all programs run at once.
    With `spare_shared`, it must not want much shared memory: beside kernels that want none, a multiprocessor would have
    to be emptied before it is divided anew.
    """
    programs, head_pad = rows * num_kv_heads, power_of_two(head_dim)
    fits = programs * max(head_pad // _SMALL_HEAD, 1) ** 2 <= _WHOLE_ROWS_AN_SM * num_sms
    if width <= SHORT_TIER and fits and (head_pad <= _SMALL_HEAD or not spare_shared):
        tile = max(power_of_two(width), 16)
        num_warps = min(max(tile * head_pad // _NUMBERS_A_WARP, 1), 8)
        return EarlyPlan(num_splits=1, late_splits=1, min_chunk=tile, long_chunk=tile, tile=tile, num_warps=num_warps)
    tile = min(max(_TILE_ELEMENTS // head_pad, 16), _MAX_TILE)
    splits = min(max(_PROGRAMS_AN_SM * num_sms // programs, 1), -(-width // SHORT_TIER))
    return EarlyPlan(num_splits=splits, late_splits=1, min_chunk=tile, long_chunk=SHORT_TIER, tile=tile)
