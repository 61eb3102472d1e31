"""Workers with real engines are killed at random; on a GPU it is `python -m bench.chaos gpu`."""

from __future__ import annotations

import argparse

import pytest

from bench.chaos_gpu import report, run


@pytest.mark.slow
async def test_no_answer_of_a_real_engine_is_lost_changed_or_repeated_by_kills_under_load() -> None:
    options = argparse.Namespace(
        model="tiny",
        random_weights=True,
        device="cpu",
        mode="deterministic",
        kv_mib=32,
        threads=1,
        kills=2,
        streams=80,
        workers=2,
        questions=18,
        concurrency=12,
        limit_s=60.0,
        seed=4,
    )
    found = await run(options)
    print("\n".join(report(found)))
    assert found.findings.kills == 2
    assert found.findings.is_flawless, found.findings.lines()
    assert found.moved > 2
    assert found.moved_apart == found.stayed_apart == 0
    assert set(found.by_runner) == {"graph"}
