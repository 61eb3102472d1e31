"""Where one program had better attend over all tokens of a row, and how its warps divide them. Pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from worker.kernels.vector_tiles import Tile

MAX_GROUP = 8
"""Query heads of a KV head: half the rows of a tensor core's product, the other half is padding."""
_NUMBERS_A_WARP = 4096
"""Keys that the registers of a warp hold; as many values come with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortPlan:
    """What one program does, and the product after it."""

    num_warps: int
    share: int
    """Tokens that a warp takes at a time, a power of two from 16 on."""
    num_tiles: int
    """How many times. All of them are asked for before the wait; those past the row's length are not computed."""
    eager: bool
    """Whether all tokens of the tier are read, so that their addresses do not wait for the row's length."""
    projection: Tile | None = None
    """Of the output projection, which has nothing to merge; None for the tile of the one that has."""

    @property
    def max_width(self) -> int:
        """Tokens of the widest tier that it is for."""
        return self.num_warps * self.share * self.num_tiles


_PROJECTION = Tile(2, 1, 256, 1)

PLANS: dict[tuple[int, int, int], tuple[ShortPlan, ...]] = {
    (9, 3, 64): (
        ShortPlan(num_warps=4, share=32, num_tiles=2, eager=False, projection=_PROJECTION),
        ShortPlan(num_warps=8, share=32, num_tiles=2, eager=False, projection=_PROJECTION),
    ),
    (32, 8, 64): (
        ShortPlan(num_warps=4, share=32, num_tiles=2, eager=False),
        ShortPlan(num_warps=8, share=16, num_tiles=4, eager=False),
    ),
    (12, 2, 128): (ShortPlan(num_warps=8, share=32, num_tiles=1, eager=False, projection=_PROJECTION),),
    (32, 32, 128): (ShortPlan(num_warps=8, share=32, num_tiles=1, eager=True),),
}
"""Measured on an H200: (query heads, KV heads, numbers of a head) -> plans, for ever wider tiers."""


def short_plan(num_heads: int, num_kv_heads: int, head_dim: int, *, width: int) -> ShortPlan | None:
    """The plan for one row of a tier of `width` tokens; None where programs had better share its tokens."""
    plans = PLANS.get((num_heads, num_kv_heads, head_dim), ())
    return next((plan for plan in plans if width <= plan.max_width), None)


def candidates(head_dim: int, width: int) -> list[ShortPlan]:
    """Plans worth measuring for tiers of up to `width` tokens."""
    found = []
    for num_warps, share in ((2, 32), (2, 64), (4, 16), (4, 32), (4, 64), (8, 16), (8, 32)):
        num_tiles = -(-width // (num_warps * share))
        if num_tiles * share * head_dim <= _NUMBERS_A_WARP:
            found += [ShortPlan(num_warps=num_warps, share=share, num_tiles=num_tiles, eager=e) for e in (False, True)]
    return found
