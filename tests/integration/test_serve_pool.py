"""`graphpool serve` for real: Ray, two replicas of the embedded model, one of them killed under way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from cluster.cli.load_table import READY
from cluster.client import AsyncGraphpoolClient, GraphpoolClient
from protos import control_pb2
from tests.fakes.command_line import graphpool, read_until, running
from tests.fakes.scrape import fetch, parse

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(300)]

QUESTION = [("user", "Why is the sky blue?")]
NUM_TOKENS = 60
MAX_REPLICA_BYTES = 1_300_000_000


@dataclass(slots=True)
class Served:
    """A running `graphpool serve`."""

    address: str
    process: psutil.Process
    metrics_port: int

    def ready(self) -> dict[str, control_pb2.ReplicaLoad]:
        with GraphpoolClient(self.address) as client:
            return {replica.replica: replica for replica in client.loads(timeout_s=5) if replica.state == READY}

    def process_of(self, replica: control_pb2.ReplicaLoad) -> psutil.Process:
        port = int(replica.address.rpartition(":")[2])
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                links = process.net_connections("tcp")
                if any(link.status == psutil.CONN_LISTEN and link.laddr.port == port for link in links):
                    return process
        raise AssertionError(f"nobody listens at {replica.address}")


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, left = psutil.wait_procs(processes, timeout=30)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return int(first)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    metrics_port = free_ports(3)
    options = ("--replicas", "2", "--port", "0", "--max-model-len", "2048", "--device", "cpu")
    metrics = ("--metrics-port", str(metrics_port))
    with running("serve", *options, *metrics, stderr=subprocess.PIPE) as command:
        address = read_until(command, r"ready at (127\.0\.0\.1:\d+); Ctrl-C", timeout_s=200)[1]
        yield Served(address, psutil.Process(command.pid), metrics_port)
        started = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        _, errors = command.communicate(timeout=60)
        assert command.returncode == 0, errors
        assert "Traceback" not in errors
        assert alive(started) == [], "processes were left behind"


def test_the_router_and_each_replica_have_a_metrics_port(served: Served) -> None:
    with GraphpoolClient(served.address) as client:
        answers = [client.generate("One, two,", max_tokens=8, temperature=0.0, ignore_eos=True) for _ in range(4)]
    router, *replicas = (parse(fetch(f"127.0.0.1:{served.metrics_port + place}")) for place in range(3))
    assert router.value("replicas", state="ready") == 2
    assert router.value("placements_total") >= len(answers)
    # Two tokens of each canary.
    assert sum(replica.value("generation_tokens_total") for replica in replicas) >= 2 * 2 + 4 * 8
    assert all(replica.value("generation_tokens_total") >= 2 + 8 for replica in replicas)


def test_the_pool_answers_with_the_real_model(served: Served) -> None:
    with GraphpoolClient(served.address) as client:
        answer = client.generate("The capital of France is", max_tokens=4, temperature=0.0)
    assert "Paris" in answer.text


def test_an_answer_arrives_in_pieces(served: Served) -> None:
    with (
        GraphpoolClient(served.address) as client,
        client.chat_stream(QUESTION, max_tokens=24, temperature=0.0) as stream,
    ):
        pieces = list(stream)
    assert len(pieces) > 8
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))


async def test_requests_at_the_same_time_are_spread_over_the_replicas(served: Served) -> None:
    async with AsyncGraphpoolClient(served.address) as client:
        asked = (client.generate([n, n], max_tokens=24, temperature=0.0, ignore_eos=True) for n in range(5, 9))
        answers = await asyncio.gather(*asked)
    assert {answer.execution.replica for answer in answers if answer.execution} == {"replica-0", "replica-1"}


def test_a_replica_stays_small(served: Served) -> None:
    sizes = [served.process_of(replica).memory_info().rss for replica in served.ready().values()]
    assert max(sizes) < MAX_REPLICA_BYTES


async def test_the_loss_of_a_replica_interrupts_only_its_own_streams_and_is_made_good(served: Served) -> None:
    before = served.ready()
    async with AsyncGraphpoolClient(served.address) as client:
        undisturbed = await client.chat(QUESTION, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        victim = client.chat_stream(QUESTION, max_tokens=2 * NUM_TOKENS, temperature=0.0, ignore_eos=True)
        num_tokens = len((await anext(victim)).token_ids)
        (lost,) = [replica for replica in served.ready().values() if replica.router_streams]
        survivor = client.chat_stream(QUESTION, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        delivered = [*(await anext(survivor)).token_ids]

        served.process_of(lost).kill()
        killed_s = time.monotonic()

        async for piece in victim:
            num_tokens += len(piece.token_ids)
            resumed = piece
        assert num_tokens == 2 * NUM_TOKENS
        assert resumed.execution is not None
        assert resumed.execution.attempts == 2
        assert resumed.execution.replica != lost.replica
        assert time.monotonic() - killed_s < 60
        async for piece in survivor:
            delivered += piece.token_ids
            last = piece
        assert last.execution is not None
        assert last.execution.replica != lost.replica
        assert tuple(delivered) == undisturbed.token_ids

        again = await asyncio.to_thread(wait_for_replacement, served, lost)
        assert again.address != lost.address
        assert served.ready().keys() == before.keys()

        streams = [client.chat(QUESTION, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) for _ in range(2)]
        answers = await asyncio.gather(*streams)
    assert {answer.execution.replica for answer in answers if answer.execution} == before.keys()
    assert all(answer.token_ids == undisturbed.token_ids for answer in answers)


def wait_for_replacement(served: Served, lost: control_pb2.ReplicaLoad) -> control_pb2.ReplicaLoad:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        replica = served.ready().get(lost.replica)
        if replica is not None and replica.incarnation != lost.incarnation:
            return replica
        time.sleep(0.2)
    raise AssertionError(f"{lost.replica} did not come back")


def test_replicas_that_cannot_start_are_one_sentence_and_no_process() -> None:
    done = graphpool("serve", "--port", "0", "--max-model-len", "1000000", "--device", "cpu", timeout_s=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("the replicas cannot start: max_model_len is 1000000")
    assert "Traceback" not in done.stderr
