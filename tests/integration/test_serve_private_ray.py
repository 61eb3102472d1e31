"""The private Ray of a pool: alone on the machine, and gone with whoever started it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]

OWNER = """
import asyncio
from cluster.private_ray import PrivateRay

async def main():
    private = PrivateRay(num_cpus=1, num_gpus=0)
    await private.start()
    print(private.folder, *(process.pid for process in private.processes()), flush=True)
    await asyncio.to_thread(input)
    import ray
    print(len(ray.nodes()), await private.stop())

asyncio.run(main())
"""

CANCELLED = """
import asyncio
import psutil
from cluster.private_ray import PrivateRay

async def main():
    start = asyncio.ensure_future(PrivateRay(num_cpus=1, num_gpus=0).start())
    await asyncio.sleep(1.5)
    start.cancel()
    await asyncio.wait([start])
    print(start.cancelled(), psutil.Process().children(recursive=True))

asyncio.run(main())
"""


TERMINATED = """
import asyncio
import os
import signal
from cluster.private_ray import PrivateRay

async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    private = PrivateRay(num_cpus=1, num_gpus=0)
    await private.start()
    os.kill(os.getpid(), signal.SIGTERM)
    await asked.wait()
    # Ray's own handler would abort the process three seconds after the signal.
    await asyncio.sleep(4)
    print(await private.stop())

asyncio.run(main())
"""

NICENESS = """
import asyncio
import os
from cluster.private_ray import PrivateRay

def of_a_worker():
    import ray
    return ray.get(ray.remote(num_cpus=1)(lambda: os.nice(0)).remote())

async def main():
    private = PrivateRay(num_cpus=1, num_gpus=0)
    await private.start()
    print(await private.call(of_a_worker) == os.nice(0), await private.stop())

asyncio.run(main())
"""


@contextlib.contextmanager
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that starts a private Ray, prints its processes' ids, and stops it when it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def started_by(process: subprocess.Popen[str]) -> tuple[Path, list[psutil.Process]]:
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    return Path(folder), [psutil.Process(int(pid)) for pid in pids]


def test_when_its_owner_is_killed_the_daemons_and_workers_end() -> None:
    with owner() as process:
        folder, started = started_by(process)
        names = {daemon: daemon.name() for daemon in started}
        process.kill()
        # Ray's two agents report the loss to a daemon that is gone too, for a minute, before they end.
        _, left = psutil.wait_procs([daemon for daemon in started if "Agent" not in names[daemon]], timeout=20)
    assert len(started) > 5
    assert [names[daemon] for daemon in left if daemon.status() != psutil.STATUS_ZOMBIE] == []
    for agent in started:
        if agent.is_running():
            agent.kill()
    shutil.rmtree(folder)


def test_two_at_once_do_not_see_each_other_and_leave_no_folder() -> None:
    with owner() as one, owner() as other:
        (folder, some), (other_folder, others) = started_by(one), started_by(other)
        assert folder != other_folder
        assert set(some).isdisjoint(others)
        for process in (one, other):
            said, _ = process.communicate("go\n", timeout=60)
            assert (said, process.returncode) == ("1 []\n", 0)
    assert not folder.exists()
    assert not other_folder.exists()


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout == "True []\n"


def test_a_process_with_a_private_ray_may_take_its_time_after_sigterm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert "SIGTERM" not in done.stderr


def test_its_workers_do_not_give_way_to_everything_else_on_the_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NICENESS], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "True []\n", done.stderr
