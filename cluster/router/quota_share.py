"""How many routers a tenant's quota is divided among."""

from __future__ import annotations

from dataclasses import dataclass

HOLD_S = 10.0
"""A router that is away for less than this, such as one that starts anew, keeps its share."""
MAX_ROUTERS = 1000


@dataclass(frozen=True, slots=True)
class QuotaShare:
    """What a router goes by, and what it has seen since it last saw as many routers as that."""

    num_routers: int = 1
    """Each router gives out this part of a quota."""
    num_fewer: int = 0
    """The most that were seen since there were fewer; 0 = there are not."""
    fewer_since_s: float = 0.0
    """When the first look found fewer."""


def next_share(share: QuotaShare, num_seen: int, now_s: float, *, hold_s: float = HOLD_S) -> QuotaShare:
    """After a look at how many routers the replicas say are attached to them, by the one with most; 0 = none says.

    More count at once, so that all of them together hardly ever give out more than the quota: for the time from a
    router's first answer to the next load report of a replica. Fewer count once all looks of `hold_s` found fewer, and
    then as many as the most of these. Failure mode: a router without clients has its share all the same.
    """
    num_seen = min(num_seen, MAX_ROUTERS)
    if num_seen == 0:
        return share
    if num_seen >= share.num_routers:
        return QuotaShare(num_seen)
    if not share.num_fewer:
        return QuotaShare(share.num_routers, num_seen, now_s)
    num_fewer = max(num_seen, share.num_fewer)
    if now_s - share.fewer_since_s >= hold_s:
        return QuotaShare(num_fewer)
    return QuotaShare(share.num_routers, num_fewer, share.fewer_since_s)
