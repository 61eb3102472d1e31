from __future__ import annotations

from worker.load import GraphReadiness, LoadSnapshot
from worker.meter import StepMeter


def snapshot(running: int, waiting: int, max_rows: int = 8) -> LoadSnapshot:
    meter = StepMeter()
    meter.decode_step_s, meter.prefill_token_s = 0.01, 0.001
    for _ in range(3):
        meter.finish(100)
    return meter.snapshot(
        running=running,
        waiting=waiting,
        max_rows=max_rows,
        outstanding_tokens=0,
        waiting_prefill_tokens=50,
        tiers=(),
        free_blocks=0,
        total_blocks=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        queue_age_s=0.0,
        readiness=GraphReadiness.EAGER,
        preemptions=0,
        wasted_rows=0,
        predicted_step_s=None,
    )


def test_a_newcomer_with_a_row_waits_for_the_prompts_before_it() -> None:
    load = snapshot(running=3, waiting=0)
    assert round(load.predicted_ttft_s, 6) == 0.06
    assert (load.max_rows, load.prefill_token_ms, load.predicted_step_s) == (8, 1.0, 0.0)


def test_with_all_rows_held_it_waits_for_ends() -> None:
    # One of eight rows ends every 100 steps of 10 ms divided by 8.
    assert round(snapshot(running=8, waiting=1).predicted_ttft_s, 6) == 0.06 + 2 * 0.125


def test_whoever_waits_for_blocks_waits_for_the_few_that_run() -> None:
    assert round(snapshot(running=2, waiting=1).predicted_ttft_s, 6) == 0.06 + 2 * 0.5


def test_what_came_a_moment_ago_to_an_idle_engine_holds_nobody_up() -> None:
    assert round(snapshot(running=0, waiting=1).predicted_ttft_s, 6) == 0.06
