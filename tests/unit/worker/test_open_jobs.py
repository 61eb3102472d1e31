"""Every job gets an answer, whoever gives it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from worker.kernels import open_jobs
from worker.kernels.open_jobs import OpenJobs


def test_a_job_gets_its_answer_and_keeps_it() -> None:
    jobs = OpenJobs(60.0)
    (first, one), (second, other) = jobs.open(), jobs.open()
    jobs.answer(second, "")
    jobs.answer(second, "late")
    jobs.answer(99, "nobody's")
    assert first != second
    assert other.result(0) == ""
    assert not one.done()
    assert len(jobs) == 1


def test_the_end_answers_what_is_open_and_what_comes_later_once() -> None:
    jobs = OpenJobs(60.0)
    _, one = jobs.open()
    assert jobs.end("over")
    assert not jobs.end("over again")
    assert jobs.have_ended
    assert one.result(0) == jobs.open()[1].result(0) == "over"
    assert not jobs


def test_jobs_are_late_when_none_was_answered_for_as_long_as_the_oldest_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.0, 9.0, 11.0, 15.0, 20.0, 26.0, 30.0])
    monkeypatch.setattr(open_jobs, "time", SimpleNamespace(monotonic=lambda: next(now)))
    jobs = OpenJobs(10.0)
    assert not jobs.is_late()
    jobs.open()
    second, _ = jobs.open()
    assert not jobs.is_late()
    assert jobs.is_late()
    jobs.answer(second, "")
    assert not jobs.is_late()
    assert jobs.is_late()
    jobs.answer(1, "")
    assert not jobs.is_late()
