"""How many cores there are is the smaller of what may be used and what a container is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker import cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight cores, no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OF_PROCESS", tmp_path / "of_process")


def test_without_a_limit_all_that_it_may_run_on_count(tmp_path: Path) -> None:
    assert cores.usable_cores() == 8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.usable_cores() == 8


@pytest.mark.parametrize(("limit", "num"), [("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)])
def test_a_containers_share_counts_where_it_is_smaller(tmp_path: Path, limit: str, num: int) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert cores.usable_cores() == num


def test_a_group_on_its_host_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "of_process").write_text("1:cpu:/elsewhere\n0::/pods/this\n")
    (tmp_path / "pods" / "this").mkdir(parents=True)
    (tmp_path / "pods" / "this" / "cpu.max").write_text("300000 100000")
    assert cores.usable_cores() == 3


@pytest.mark.parametrize(("quota", "num"), [("400000", 4), ("-1", 8)])
def test_older_control_groups_are_read_too(tmp_path: Path, quota: str, num: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores.usable_cores() == num
