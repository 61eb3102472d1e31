"""`graphpool serve` when a daemon of its own Ray ends: it says so, and ends in order when it cannot go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.client import GraphpoolClient
from tests.fakes.checkpoints import config_dict, write_config
from tests.fakes.command_line import read_until, running

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

NUM_TOKENS = 300


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    model = write_config(tmp_path, config_dict("llama", max_position_embeddings=512))
    options = ("--device", "cpu", "--threads", "1", "--load-format", "dummy", "--port", "0", "--drain-s", "40")
    with running("serve", "--model", str(model), *options, stderr=subprocess.PIPE) as process:
        yield process


def daemons(served: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    return {process.name(): process for process in psutil.Process(served.pid).children()}


def folder_of(raylet: psutil.Process) -> Path:
    session = next(argument for argument in raylet.cmdline() if argument.startswith("--session_dir="))
    return Path(session.partition("=")[2]).parent


def left_of(processes: list[psutil.Process]) -> list[str]:
    _, left = psutil.wait_procs(processes, timeout=30)
    return [process.name() for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_without_its_gcs_a_pool_serves_on_and_ends_in_order_before_ray_ends_it(served: subprocess.Popen[str]) -> None:
    address = read_until(served, r"ready at (127\.0\.0\.1:\d+); Ctrl-C")[1]
    everything = psutil.Process(served.pid).children(recursive=True)
    folder = folder_of(daemons(served)["raylet"])
    with GraphpoolClient(address) as client:
        stream = client.stream([1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True)
        num_tokens = len(next(stream).token_ids)
        daemons(served)["gcs_server"].kill()
        num_tokens += sum(len(piece.token_ids) for piece in stream)
        assert num_tokens == NUM_TOKENS
        read_until(served, r"Ray's gcs_server has ended.*: nobody replaces replicas any more")
        assert len(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
    # Ray would end the process after 60 s, in the middle of whatever it does.
    _, said = served.communicate(timeout=50)
    assert served.returncode == 1
    assert said.splitlines()[-1].startswith("Ray's gcs_server has ended, and the pool cannot go on")
    assert left_of(everything) == []
    assert not folder.exists()


def test_a_lost_raylet_is_told_and_the_pool_serves_until_it_has_no_replica(served: subprocess.Popen[str]) -> None:
    address = read_until(served, r"ready at (127\.0\.0\.1:\d+); Ctrl-C")[1]
    everything = psutil.Process(served.pid).children(recursive=True)
    daemons(served)["raylet"].kill()
    read_until(served, r"Ray's raylet has ended.*: nobody replaces replicas any more")
    with GraphpoolClient(address) as client:
        assert len(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
    for process in everything:
        if process.is_running() and process.name().startswith("ray::ServeRep"):
            process.kill()
    _, said = served.communicate(timeout=30)
    assert served.returncode == 1
    assert "replaces it" not in said
    assert said.splitlines()[-1].startswith("Ray's raylet has ended, and the pool cannot go on")
    assert left_of(everything) == []
