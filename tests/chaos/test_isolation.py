"""Streams notice nothing of what happens to other replicas; on a machine's own clock it is `python -m bench.chaos isolation`."""

from __future__ import annotations

import argparse

import pytest

from bench.chaos_isolation import ALL, FAULTS, MAX_RATIO, VICTIM, figures_of, in_virtual_time
from bench.chaos_open_load import Phase, Timed, together
from tests.chaos.oracle import Question, Record
from tests.chaos.virtual_time import run_virtual

OPTIONS = argparse.Namespace(replicas=4, rate=50.0, seconds=4.0, seed=5)


@pytest.mark.slow
def test_streams_on_other_replicas_are_as_fast_beside_broken_ones() -> None:
    phases = {phase.name: phase for phase in run_virtual(lambda: in_virtual_time(OPTIONS))}
    bases = [phase for name, phase in phases.items() if name.startswith("no fault")]
    assert [phase.num_wrong for phase in phases.values()] == [0] * 6
    for name in (*FAULTS, ALL):
        phase, base = phases[name], together(bases)
        if name in FAULTS:
            assert phase.num_faults >= 1
            phase, base = phase.without(VICTIM), base.without(VICTIM)
        assert len(phase.answers) > 50
        ratios = {metric: value for metric, unit, value in figures_of(phase, base) if unit == "ratio"}
        assert all(value <= MAX_RATIO[name] for value in ratios.values()), (name, ratios)
    assert any(one.record.attempts > 1 for name in FAULTS for one in phases[name].answers)
    # A step is 10 ms: a first token takes one or two of them, a further one comes with every step or every frame.
    calm = phases["no fault"]
    assert 10 <= calm.ttft_ms(0.5) <= 30
    assert calm.token_ms(0.5) <= 20


def timed(replica: str, attempts: int, came_s: list[float]) -> Timed:
    record = Record(question=Question(prompt=(3,), max_tokens=1), replicas=(replica,), attempts=attempts)
    record.first_token_s = came_s[0]
    return Timed(record, came_s)


def test_answers_that_had_to_do_with_the_broken_replica_are_left_out() -> None:
    others, own, moved = timed("r1", 1, [0.5, 0.75]), timed(VICTIM, 1, [0.1]), timed("r1", 2, [0.2])
    phase = Phase("killed", [others, own, moved], num_faults=2).without(VICTIM)
    assert (phase.answers, phase.num_faults) == ([others], 2)
    assert (phase.ttft_ms(0.99), phase.token_ms(0.5)) == (500.0, 250.0)


def test_parts_are_counted_together() -> None:
    parts = [Phase("a", [timed("r1", 1, [0.1])]), Phase("b", [timed("r1", 1, [0.3])])]
    assert together(parts).ttft_ms(0.99) == 300.0
