"""`graphpool worker` for real: the embedded model behind a port, without Ray."""

from __future__ import annotations

import signal
import subprocess

import pytest

from cluster.client import GraphpoolClient
from tests.fakes.command_line import graphpool, read_until, running

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

WORKER = ("worker", "--port", "0", "--device", "cpu", "--threads", "1", "--max-model-len", "2048")
READY = r"ready at (127\.0\.0\.1:\d+)"


def test_a_worker_answers_directly_and_through_a_router_and_stops_when_told_to() -> None:
    with running("router", "--port", "0", stderr=subprocess.PIPE) as router:
        router_address = read_until(router, r"at (127\.0\.0\.1:\d+)")[1]
        with running(*WORKER, "--announce", router_address, "--name", "alone", stderr=subprocess.PIPE) as worker:
            address = read_until(worker, READY)[1]
            with GraphpoolClient(address) as direct, GraphpoolClient(router_address) as routed:
                straight = direct.generate("The capital of France is", max_tokens=6, temperature=0.0)
                through = routed.generate("The capital of France is", max_tokens=6, temperature=0.0)
            assert "Paris" in straight.text
            assert through.token_ids == straight.token_ids
            assert through.execution is not None
            assert through.execution.replica == "alone"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0
        assert graphpool("status", "--address", router_address).returncode == 1


def test_a_worker_that_is_told_to_stop_finishes_its_answer() -> None:
    with running(*WORKER, stderr=subprocess.PIPE) as worker:
        with GraphpoolClient(read_until(worker, READY)[1]) as client:
            stream = client.stream("Once upon a time", max_tokens=40, temperature=0.0, ignore_eos=True)
            num_tokens = len(next(stream).token_ids)
            worker.send_signal(signal.SIGTERM)
            num_tokens += sum(len(piece.token_ids) for piece in stream)
        assert num_tokens == 40
        assert worker.wait(30) == 0


def test_a_length_the_model_cannot_have_is_one_sentence() -> None:
    done = graphpool("worker", "--port", "0", "--device", "cpu", "--max-model-len", "1000000", timeout_s=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("max_model_len is 1000000, ")
    assert "Traceback" not in done.stderr
