"""A bit of a weight flips in a process that serves: it ends by itself, and what it answered goes on elsewhere, exactly."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.shapes import TINY_SHAPE
from cluster.client import Answer, GraphpoolClient
from cluster.replica_process import ENGINE_FAILED
from protos import fault_pb2, fault_pb2_grpc
from tests.fakes.command_line import read_until, running
from tests.fakes.real_pool import METRICS, Server, real_router, wait_ready
from tests.fakes.scrape import fetch, parse

INTERVAL_S = 0.3
MAX_MODEL_LEN = 2048
VOCAB: int = TINY_SHAPE["vocab_size"]
HIDDEN: int = TINY_SHAPE["hidden_size"]
PROMPT = (17, 4, 99, 250)
MAX_TOKENS = 500
SLOW_STEP_S = 0.02
"""An answer takes ten seconds then."""
FOUND_S = 20.0
"""Of a machine that does other things; alone it is a second or two."""


@dataclass(frozen=True, slots=True)
class Worker(Server):
    """One that takes faults."""

    def inject(self, **fault: Any) -> None:
        with grpc.insecure_channel(self.address) as channel:
            fault_pb2_grpc.FaultServiceStub(channel).Inject(fault_pb2.InjectRequest(**fault), timeout=10)

    def flip(self, tensor: str, bit: int) -> None:
        self.inject(flip_weight=fault_pb2.FlipFault(tensor=tensor, bit=bit))

    def count(self, name: str) -> float:
        return parse(fetch(self.metrics_address)).value(name)

    def wait_checked(self) -> None:
        """Until all weights have been compared once: from then on the first pass has noted them."""
        give_up_s = time.monotonic() + 60
        while not self.count("weight_checks_total"):
            assert time.monotonic() < give_up_s
            time.sleep(0.05)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_SHAPE | {"max_position_embeddings": MAX_MODEL_LEN}))
    return tmp_path


@contextlib.contextmanager
def worker(name: str, model: Path, router: Server) -> Iterator[Worker]:
    options = (
        *("worker", "--model", str(model), "--set", "load_format=dummy", "--device", "cpu", "--threads", "1"),
        *("--max-batch", "4", "--kv-cache-mib", "16", "--deterministic", "--enable-fault-injection"),
        *("--set", f"weight_check_interval_s={INTERVAL_S}", "--port", "0", "--metrics-port", "0"),
        *("--name", name, "--announce", router.address),
    )
    with running(*options, stderr=subprocess.PIPE) as process:
        address = read_until(process, r"ready at (127\.0\.0\.1:\d+)", 120)[1]
        yield Worker(address, read_until(process, METRICS)[1], process)


def whole(client: GraphpoolClient) -> list[Answer]:
    with client.stream(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=120) as stream:
        return list(stream)


def tokens(pieces: list[Answer]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


def test_a_flipped_bit_is_found_at_work_and_at_rest_and_answers_go_on_elsewhere(model: Path) -> None:
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(real_router())
        first, second = workers = [stack.enter_context(worker(name, model, router)) for name in ("first", "second")]
        for one in workers:
            wait_ready(router, one, 60)
            one.wait_checked()
        refuses_bits_that_do_not_exist(first)
        client, direct = (stack.enter_context(GraphpoolClient(one.address)) for one in (router, second))
        expected = tokens(whole(direct))
        for one in workers:
            one.inject(slow_steps=fault_pb2.SlowFault(factor=1, extra_s=SLOW_STEP_S))
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(whole, client) for _ in range(2)]  # one on each
            time.sleep(1)
            first.flip("embedding", bit_that_nobody_needs(expected))
            assert first.process.wait(FOUND_S) == ENGINE_FAILED
            assert not any(answer.done() for answer in answers)
            found = [answer.result(120) for answer in answers]
        assert [tokens(pieces) for pieces in found] == [expected] * 2
        executions = [pieces[-1].execution for pieces in found]
        assert sorted((one.replica, one.attempts) for one in executions if one) == [("second", 1), ("second", 2)]
        assert parse(fetch(router.metrics_address)).value("trials_total") == 0  # no request is suspected
        assert "embedding" in read_until(first.process, "WeightsCorrupted: .*").group()
        assert second.count("weight_checked_bytes_total") >= second.count("weight_check_bytes") > 100_000
        assert second.count("weight_check_age_seconds") < FOUND_S
        second.flip("layers.1.down_weight", 12345)
        assert second.process.wait(FOUND_S) == ENGINE_FAILED


def bit_that_nobody_needs(answer: tuple[int, ...]) -> int:
    """The least of a token that is no part of the answer: what was delivered before it is found is right, too."""
    unused = next(token for token in range(3, VOCAB) if token not in answer and token not in PROMPT)
    return 8 * 4 * HIDDEN * unused


def refuses_bits_that_do_not_exist(one: Worker) -> None:
    for tensor, bit in (("nothing", 0), ("final_norm", 8 * 4 * HIDDEN), ("", 0)):
        with pytest.raises(grpc.RpcError) as caught:
            one.flip(tensor, bit)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
