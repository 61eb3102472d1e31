"""Routers and replicas together are frozen, killed, drained and cut off at random while clients come and go."""

from __future__ import annotations

import pytest

from tests.chaos.fleet_campaign import Findings, run_campaign

SECONDS = 12.0
GROWN_MIB = 32
GROWN_TASKS = 10


def is_bounded(found: Findings) -> bool:
    """Whether no process that is at rest again holds more than before."""
    return all(
        mib <= found.before[name][0] + GROWN_MIB and tasks <= found.before[name][1] + GROWN_TASKS
        for name, (mib, tasks) in found.after.items()
    )


@pytest.mark.parametrize(("seed", "is_proxied"), [(3, False), (4, True)])
async def test_no_token_is_lost_changed_or_repeated_and_nothing_is_left_behind(seed: int, is_proxied: bool) -> None:
    found = await run_campaign(SECONDS, seed, is_proxied=is_proxied)
    print(dict(found.events), len(found.records), found.num_left)
    assert found.problems == []
    assert sum(record.is_right for record in found.records) > 20
    assert is_bounded(found), (found.before, found.after)
