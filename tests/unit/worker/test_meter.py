from __future__ import annotations

import pytest

from worker.batch import Batch
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


class Prefill:
    """As much of a batch as is counted."""

    phase = "prefill"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


def record(meter: StepMeter, num_tokens: int, took_s: float) -> None:
    batch: Batch = Prefill(num_tokens)  # type: ignore[assignment]
    meter.record(batch, "eager", took_s)


def test_what_a_prompt_token_costs_is_told_by_the_steps_that_compute_many() -> None:
    meter = StepMeter()
    record(meter, 4, 0.7)  # the canary, in a process that has just started
    for _ in range(5):
        record(meter, 16, 0.1)
        record(meter, 512, 1.0)
    assert meter.prefill_token_s == pytest.approx(1.1 / 528, rel=0.3)
    # So a hang shows in seconds, and not in the time that so many small steps would take.
    assert meter.predict_s(512) == pytest.approx(1.1, rel=0.3)


def test_prompts_that_become_dearer_are_noticed_within_some_steps() -> None:
    meter = StepMeter()
    for took_s in (0.1, 0.4):
        for _ in range(40):
            record(meter, 100, took_s)
    assert meter.prefill_token_s == pytest.approx(0.004, rel=0.05)
