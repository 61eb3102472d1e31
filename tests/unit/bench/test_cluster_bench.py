"""The parts of the cluster bench that need no cluster."""

from __future__ import annotations

import argparse
import random

import grpc
import pytest

from bench.cluster import model_plan_from, results_of
from bench.report_tables import by_note
from cluster.client import CallError
from tests.chaos.cluster_campaign import Plan, plan_from
from tests.chaos.cluster_events import Event, question, together
from tests.chaos.cluster_model import ModelPlan
from tests.chaos.oracle import Outcome, Question, Record

ASKED = Question(prompt=(3, 4), max_tokens=8)


def record(outcome: Outcome = Outcome.COMPLETE, *, attempts: int = 1, gap_s: float = 0.1) -> Record:
    return Record(question=ASKED, outcome=outcome, attempts=attempts, longest_gap_s=gap_s)


def event(name: str, whole_s: float, *records: Record) -> Event:
    made = Event(name=name, whole_s=whole_s)
    for one in records:
        made.take(one)
    return made


def test_an_event_counts_what_its_answers_went_through() -> None:
    made = event("e", 1.0, record(), record(attempts=2, gap_s=0.7))
    assert (made.answers, made.lost, made.moved, made.longest_gap_s) == (2, 0, 1, 0.7)
    assert made.is_flawless


@pytest.mark.parametrize(
    "broken",
    [
        record(Outcome.FAILED),
        record(Outcome.STUCK),
        Record(question=ASKED, outcome=Outcome.COMPLETE, num_duplicated=1),
        Record(question=ASKED, outcome=Outcome.COMPLETE, num_changed=1),
    ],
)
def test_an_event_with_one_bad_answer_is_not_flawless(broken: Record) -> None:
    assert not event("e", 1.0, record(), broken).is_flawless


def test_what_broke_is_said() -> None:
    broken = record(Outcome.FAILED)
    broken.error = CallError(grpc.StatusCode.UNAVAILABLE, "no replica")
    broken.violations.append("choice 0 has 3 of 8 tokens")
    problems = event("e", 1.0, broken).problems
    assert problems[0] == "choice 0 has 3 of 8 tokens"
    assert "no replica" in problems[1]


def test_events_of_a_name_share_a_line_of_sums_and_longest_times() -> None:
    events = [
        event("a", 2.0, record(gap_s=0.2)),
        event("b", 1.0, record()),
        event("a", 4.0, record(attempts=2, gap_s=0.5), record()),
    ]
    assert [(name, len(found)) for name, found in together(events).items()] == [("a", 2), ("b", 1)]
    results = results_of(events, seed=3, load_average="1")
    of_a = {row.metric: row.value for row in results.rows if row.note == "a"}
    assert of_a["times"] == 2
    assert of_a["running"] == 3
    assert of_a["moved"] == 1
    assert of_a["longest_gap_ms"] == 500
    assert (of_a["whole_p50_s"], of_a["whole_longest_s"]) == (3.0, 4.0)
    assert results.correctness["all_right"]


def test_a_lost_answer_fails_the_bench() -> None:
    assert not results_of([event("a", 1.0, record(Outcome.FAILED))], seed=1, load_average="1").correctness["all_right"]


def test_the_table_has_a_line_for_each_event() -> None:
    rows = results_of([event("node killed", 5.0, record()), event("nothing", 0.0, record())], seed=1, load_average="1")
    document = {
        "rows": [{"metric": row.metric, "unit": row.unit, "value": row.value, "note": row.note} for row in rows.rows]
    }
    lines = by_note(document).splitlines()
    assert lines[2].startswith("| node killed | 1 | 1 | 0 |")
    assert lines[3].endswith("| - | - |"), "nothing has to come back from nothing"


def test_questions_depend_on_nothing_but_their_draw() -> None:
    assert question(random.Random(5), 100) == question(random.Random(5), 100)
    assert len({question(random.Random(number), 100) for number in range(20)}) == 20


@pytest.mark.parametrize("wrong", [{"restarts": -1}, {"cycles": -1}, {"kills": -1}, {"gcs_down_s": 60.0}])
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        Plan(**wrong)  # type: ignore[arg-type]


def test_the_command_line_makes_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.chaos.cluster_campaign.missing", lambda: None)
    assert plan_from(argparse.ArgumentParser(), ["--restarts", "20", "--seed", "4"]) == Plan(restarts=20, seed=4)
    assert capsys.readouterr().out == "seed 4\n"


def test_a_machine_without_a_cluster_is_told_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.chaos.cluster_campaign.missing", lambda: "no memory")
    with pytest.raises(SystemExit):
        plan_from(argparse.ArgumentParser(), [])
    assert "no memory" in capsys.readouterr().err


def test_the_questions_of_a_model_are_short_of_every_kind_and_tell_logprobs() -> None:
    asked = ModelPlan(questions=12, min_tokens=24, max_tokens=48).asked()
    assert len({one.kind for one in asked}) >= 4
    assert all(24 <= one.sampling["max_tokens"] <= 48 and one.sampling["logprobs"] for one in asked)


def test_the_replicas_of_a_model_compute_alike() -> None:
    worker = ModelPlan().worker(4)
    assert worker.deterministic
    assert worker.cpu_threads == 1


@pytest.mark.parametrize(
    "wrong", [{"streams": 0}, {"questions": 0}, {"rounds": 0}, {"min_tokens": 50}, {"max_tokens": 129}]
)
def test_a_model_plan_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is |{next(iter(wrong))} [0-9]"):
        ModelPlan(**wrong)  # type: ignore[arg-type]


def test_a_model_on_the_command_line_makes_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cluster.missing", lambda: None)
    assert model_plan_from(["--model", "m", "--streams", "3"]) == ModelPlan(model="m", streams=3)


def test_events_with_a_model_have_a_file_of_their_own() -> None:
    results = results_of([event("a", 1.0, record())], seed=1, load_average="1", bench="cluster_events_model", model="m")
    assert results.bench == "cluster_events_model"
    assert {row.model for row in results.rows} == {"m"}
