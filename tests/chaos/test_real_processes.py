"""The embedded model in processes that are killed: an answer that goes on elsewhere is the answer that had been begun."""

from __future__ import annotations

import contextlib
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from cluster.client import Answer, GraphpoolClient
from protos import control_pb2, fault_pb2, fault_pb2_grpc
from tests.fakes.command_line import read_until, running
from tests.fakes.real_pool import real_router

pytestmark = pytest.mark.model

NAMES = ("first", "second", "third")
WORKER = (
    *("worker", "--device", "cpu", "--threads", "1", "--max-model-len", "256", "--max-batch", "4", "--port", "0"),
    *("--deterministic", "--enable-fault-injection"),
)
MAX_TOKENS = 24
TEXT = "Rivers begin in the mountains and"
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "seed": 5, "n": 2, "repetition_penalty": 1.1},
)


def whole(client: GraphpoolClient, params: dict[str, Any]) -> list[tuple[object, ...]]:
    with client.stream(TEXT, max_tokens=MAX_TOKENS, timeout_s=120, **params) as stream:
        pieces = list(stream)
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    return [folded(pieces, index) for index in range(params.get("n", 1))]


def folded(pieces: list[Answer], index: int) -> tuple[object, ...]:
    parts = [choice for piece in pieces for choice in piece.choices if choice.index == index]
    tokens = tuple(token for part in parts for token in part.token_ids)
    logprobs = tuple(entry for part in parts for entry in part.logprobs)
    return tokens, "".join(part.text for part in parts), logprobs, parts[-1].finish_reason


def kill_at(address: str, prompt: list[int], after_tokens: int) -> None:
    fault = fault_pb2.PromptFault(prompt_token_ids=prompt, after_tokens=after_tokens)
    with grpc.insecure_channel(address) as channel:
        fault_pb2_grpc.FaultServiceStub(channel).Inject(fault_pb2.InjectRequest(kill=fault), timeout=10)


def test_answers_of_killed_processes_are_those_of_one_that_lives() -> None:
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(real_router())
        workers = {
            name: stack.enter_context(
                running(*WORKER, "--name", name, "--announce", router.address, stderr=subprocess.PIPE)
            )
            for name in NAMES
        }
        addresses = {
            name: read_until(process, r"ready at (127\.0\.0\.1:\d+)", 240)[1] for name, process in workers.items()
        }
        client = stack.enter_context(GraphpoolClient(router.address))
        with GraphpoolClient(addresses["third"]) as direct:
            expected = [whole(direct, params) for params in PARAMS]
            prompt = direct.tokenize(TEXT)
        _wait_ready(client, len(NAMES))
        for victim, after_tokens, params, right in zip(NAMES, (7, 0), PARAMS, expected, strict=False):
            kill_at(addresses[victim], prompt, after_tokens)
            # As many at once as there are replicas: each has one.
            num_alive = len(NAMES) - NAMES.index(victim)
            with ThreadPoolExecutor(num_alive) as threads:
                answers = list(threads.map(lambda _, params=params: whole(client, params), range(num_alive)))
            assert answers == [right] * num_alive
            assert workers[victim].wait(30) == -9


def _wait_ready(client: GraphpoolClient, count: int) -> None:
    give_up_s = time.monotonic() + 60
    while sum(load.state == control_pb2.REPLICA_STATE_READY for load in client.loads()) < count:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
