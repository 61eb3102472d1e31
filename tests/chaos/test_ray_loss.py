"""Ray's own daemons are killed: Ray places and replaces replicas, and no token travels through it."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from cluster.cli.load_table import READY
from cluster.client import GraphpoolClient
from tests.fakes.command_line import read_until, running

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_REPLICAS = 2
WITHOUT_GCS_S = 20.0
TEXT = "The river runs"
PARAMS = {"max_tokens": 4, "temperature": 0.0, "timeout_s": 60}


@dataclass(slots=True)
class Served:
    """A running `graphpool serve`."""

    address: str
    process: psutil.Process

    def kill(self, words: str) -> list[psutil.Process]:
        """SIGKILL to every descendant whose command line says that; returns them."""
        found = [process for process in self.process.children(recursive=True) if words in _title(process)]
        for process in found:
            process.kill()
        return found

    def answers(self, seconds: float, clients: int = 2) -> list[tuple[int, ...]]:
        """What clients get that ask one after the other for so long."""
        until_s = time.monotonic() + seconds

        def ask_on(_: int) -> list[tuple[int, ...]]:
            with GraphpoolClient(self.address) as client:
                found = []
                while time.monotonic() < until_s:
                    found.append(client.generate(TEXT, **PARAMS).token_ids)  # type: ignore[arg-type]
                return found

        with ThreadPoolExecutor(clients) as threads:
            return [answer for answers in threads.map(ask_on, range(clients)) for answer in answers]

    def incarnations(self) -> set[str]:
        with GraphpoolClient(self.address) as client:
            return {load.incarnation for load in client.loads(timeout_s=5) if load.state == READY}


def _title(process: psutil.Process) -> str:
    """Nothing, of one that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:2])
    return ""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ("--replicas", str(NUM_REPLICAS), "--port", "0", "--max-model-len", "256", "--device", "cpu")
    with running("serve", *options, stderr=subprocess.PIPE) as command:
        address = read_until(command, r"ready at (127\.0\.0\.1:\d+); Ctrl-C", timeout_s=300)[1]
        yield Served(address, psutil.Process(command.pid))
        command.kill()
        command.communicate(timeout=60)


def test_the_pool_serves_while_serves_controller_is_killed(served: Served) -> None:
    before = served.incarnations()
    (expected,) = set(served.answers(1))
    assert served.kill("ray::ServeController")
    answers = served.answers(10)
    assert len(answers) > 3
    assert set(answers) == {expected}
    assert served.incarnations() == before


def test_the_pool_serves_while_the_head_of_ray_is_dead(served: Served) -> None:
    before = served.incarnations()
    (expected,) = set(served.answers(1))
    assert served.kill("gcs_server")
    answers = served.answers(WITHOUT_GCS_S)
    assert len(answers) > 3
    assert set(answers) == {expected}
    assert served.incarnations() == before
