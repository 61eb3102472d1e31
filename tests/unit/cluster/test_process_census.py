"""Finding and ending the processes that belong to something we started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.process_census import ProcessCensus, described

ROOT = Path(__file__).resolve().parents[3]
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process marked "graphpool-test" and its own child."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "graphpool-test"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        yield psutil.Process(parent.pid), child
    finally:
        for process in (child, psutil.Process(parent.pid) if psutil.pid_exists(parent.pid) else child):
            if process.is_running():
                process.kill()
        parent.wait()


def marked(process: psutil.Process) -> bool:
    return "graphpool-test" in process.cmdline()


def test_a_census_holds_the_picked_child_and_all_below_it(family: tuple[psutil.Process, psutil.Process]) -> None:
    census = ProcessCensus(marked)
    census.observe()
    assert set(census.alive()) == set(family)


def test_children_that_were_not_picked_are_left_alone(family: tuple[psutil.Process, psutil.Process]) -> None:
    census = ProcessCensus(lambda process: False)
    assert census.end(grace_s=0.1) == []
    assert all(process.is_running() for process in family)


def test_an_orphan_that_was_seen_is_still_found_and_ended(family: tuple[psutil.Process, psutil.Process]) -> None:
    parent, child = family
    census = ProcessCensus(marked)
    census.observe()
    parent.kill()
    psutil.wait_procs([parent], timeout=20)
    assert census.alive() == [child]
    expected = described(child)
    assert census.end(grace_s=0.2) == [expected]
    assert census.alive() == []


def test_those_that_end_in_time_are_not_reported_as_killed(family: tuple[psutil.Process, psutil.Process]) -> None:
    census = ProcessCensus(marked)
    census.observe()
    for process in family:
        process.send_signal(signal.SIGTERM)
    assert census.end(grace_s=5.0) == []


def test_ending_all_descendants_ends_children_and_grandchildren() -> None:
    # In a process of its own: other tests of this one may have started something that must live on.
    script = f"""
import subprocess, sys
import psutil
from cluster.process_census import end_all_descendants
parent = subprocess.Popen([sys.executable, "-c", {PARENT!r}], stdout=subprocess.PIPE, text=True)
family = [psutil.Process(parent.pid), psutil.Process(int(parent.stdout.readline()))]
end_all_descendants()
_, alive = psutil.wait_procs(family, timeout=20)
sys.exit(len([process for process in alive if process.status() != psutil.STATUS_ZOMBIE]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 0
