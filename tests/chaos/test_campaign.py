"""Replicas are killed at random while many clients stream; the full campaign is `python -m bench.chaos kills`."""

from __future__ import annotations

from tests.chaos.campaign import Plan, run


async def test_no_answer_is_lost_changed_or_repeated_by_kills_under_load() -> None:
    findings = await run(Plan(kills=10, streams=1200, seed=20, replicas=4, concurrency=96))
    print("\n".join(findings.lines()))
    assert findings.kills == 10
    assert findings.is_flawless, findings.lines()
    assert findings.resumed > 10
