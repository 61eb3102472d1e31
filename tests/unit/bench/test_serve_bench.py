"""What the bench of a pool under Serve measures with, without Serve."""

from __future__ import annotations

from bench.serve_gpu import Parts  # first: it sets what gRPC reads when it is imported

import argparse  # isort: skip
import asyncio
import json
import time
from pathlib import Path

import pytest

from bench.report_tables import tables_of
from bench.results_file import Results
from bench.serve_load import Findings, Load, Question, Record
from bench.serve_memory import MemoryWatch
from bench.serve_plan import Plan, plan_of
from tests.fakes.script import script
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import script_pool
from tests.fakes.waiting import until


def plan(folder: Path, *, gpus: int = 1, device: str = "cpu", limit_s: float | None = None) -> Plan:
    return plan_of(
        argparse.Namespace(model="tiny", gpus=gpus, device=device, skip_starts=False, limit_s=limit_s), folder
    )


def question(number: int, length: int) -> Question:
    prompt = (5, 6, number)
    return Question(prompt=prompt, answer=script(prompt, 0, 0, length))


def test_lost_refused_longer_and_other_answers_are_told_apart() -> None:
    asked, found = Question(prompt=(1,), answer=(7, 8, 9)), Findings()
    for received in ([7, 8, 9], [7, 8], [7, 8, 9, 9], [7, 8, 8]):
        found.take(Record(0.0, received=received), asked)
    found.take(Record(0.0, received=[7, 8, 9], problem="Unavailable"), asked)
    found.take(Record(0.0, problem="ResourceExhausted", is_refused=True), asked)
    assert (found.lost, found.refused, found.duplicated, found.changed) == (2, 1, 1, 1)
    assert not found.is_flawless
    assert not Findings().is_flawless, "nothing was asked"


async def test_answers_of_a_replica_that_is_killed_go_on_and_are_whole() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.01)) as pool:
        load = Load(pool.client, [question(number, 60) for number in range(4)])
        load.set_rate(40.0)
        await until(lambda: load.num_running > 4, 10)
        before = load.cut()
        await pool.replicas[0].stop()
        await asyncio.sleep(0.3)
        after = await load.finish()
        await load.close()
    assert before.is_flawless
    assert after.is_flawless
    assert [record for record in before.moved if record.longest_gap_s > 0]
    assert {replica for record in before.records for replica in record.replicas}


async def test_an_answer_that_is_not_the_undisturbed_one_is_noticed() -> None:
    async with script_pool(1) as pool:
        right = question(1, 5)
        load = Load(pool.client, [Question(prompt=right.prompt, answer=(*right.answer[:4], right.answer[4] + 1))])
        load.set_rate(100.0)
        await until(lambda: load.num_running > 0, 10)
        found = await load.finish()
        await load.close()
    assert found.changed == len(found.records) > 0


def test_when_memory_fell_is_counted_from_an_event() -> None:
    watch = MemoryWatch("cpu")
    give_up_s = time.monotonic() + 10
    while not watch.now() and time.monotonic() < give_up_s:
        time.sleep(0.01)
    watch.stop()
    began_s = time.monotonic()
    watch._samples = [(began_s - 1, (10,)), (began_s + 0.5, (90,)), (began_s + 0.75, (20,)), (began_s + 1, (5,))]
    assert watch.fell_after(began_s, 0, 25) == pytest.approx(0.75)
    assert watch.fell_after(began_s, 0, 1) is None


async def test_a_part_that_fails_or_hangs_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    results = Results(bench="serve_gpu", hardware="none")
    parts = Parts(plan(tmp_path, limit_s=60.0), results, tmp_path)

    async def fail() -> None:
        raise RuntimeError("two replicas are one")

    assert not await parts.run("fails", fail, 5)
    assert not await parts.run("hangs", lambda: asyncio.sleep(60), 0.05)
    assert await parts.run("works", lambda: asyncio.sleep(0), 5)
    assert not parts.all_done
    written = json.loads((tmp_path / "serve_gpu.json").read_text())
    assert written["correctness"]["parts"] == {
        "fails": "failed: RuntimeError: two replicas are one",
        "hangs": "failed: not done within 0 s",
        "works": "done",
    }


async def test_without_time_a_part_is_left_out(tmp_path: Path) -> None:
    results = Results(bench="serve_gpu", hardware="none")
    parts = Parts(plan(tmp_path, limit_s=1.0), results, tmp_path)
    assert not await parts.run("late", lambda: asyncio.sleep(0), 5)
    assert results.correctness["parts"] == {"late": "left out: no time"}


def test_limits_of_all_parts_are_within_those_of_one_call(tmp_path: Path) -> None:
    one, two = plan(tmp_path, device="cuda"), plan(tmp_path, device="cuda", gpus=2)
    assert (one.limit_s, two.limit_s) == (225, 385)
    assert one.deterministic.deterministic
    assert not one.fast.deterministic
    assert (one.bench, two.bench) == ("serve_gpu", "serve_two_gpus")


def test_starts_are_a_table_by_phase_and_events_one_by_what_happened() -> None:
    results = Results(bench="serve_gpu", hardware="none")
    for note, seconds in (("cold start", 9.5), ("warm start", 4.0)):
        results.add(
            system="graphpool", model="x", metric="start_ready_s", unit="s", value=seconds, scope="router", note=note
        )
    results.add(system="graphpool", model="x", metric="lost", unit="answers", value=0, scope="router", note="a kill")
    results.correctness |= {"parts": {"a kill": "done", "a drain": "left out: no time"}, "wrong": ["2 of 3"]}
    rows = [vars_of(row) for row in results.rows]
    shown = tables_of(
        {
            "bench": "serve_gpu",
            "rows": rows,
            "correctness": results.correctness,
            "versions": {},
            "hardware": "none",
            "date": "2026-01-01",
            "command": "x",
        }
    )
    assert "| ready | 9.5 | 4 |" in shown
    assert "| a kill | 0 |" in shown
    assert "a drain: left out: no time." in shown
    assert "Wrong: 2 of 3." in shown


def vars_of(row: object) -> dict[str, object]:
    return {name: getattr(row, name) for name in ("metric", "unit", "value", "note")}
