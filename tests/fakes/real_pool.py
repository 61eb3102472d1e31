"""A router and one replica of the embedded model, each a process of its own, without Ray."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cluster.client import GraphpoolClient
from protos import control_pb2
from tests.fakes.command_line import read_until, running

MAX_MODEL_LEN = 2048
MAX_BATCH = 8
WORKER = (
    *("worker", "--device", "cpu", "--threads", "1", "--metrics-port", "0"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-batch", str(MAX_BATCH)),
)
METRICS = r"http://(127\.0\.0\.1:\d+)/metrics"


@dataclass(frozen=True, slots=True)
class Server:
    """One running command."""

    address: str
    metrics_address: str
    process: subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class RealPool:
    """Both of them; the worker is READY in the router."""

    router: Server
    worker: Server


@contextlib.contextmanager
def real_router() -> Iterator[Server]:
    with running("router", "--port", "0", "--metrics-port", "0", stderr=subprocess.PIPE) as process:
        address = read_until(process, r"router at (127\.0\.0\.1:\d+)")[1]
        yield Server(address, read_until(process, METRICS)[1], process)


@contextlib.contextmanager
def real_worker(
    router: Server, *, port: int = 0, name: str = "alone", options: tuple[str, ...] = ()
) -> Iterator[Server]:
    place = ("--port", str(port), "--name", name, "--announce", router.address)
    with running(*WORKER, *place, *options, stderr=subprocess.PIPE) as process:
        address = read_until(process, r"ready at (127\.0\.0\.1:\d+)")[1]
        yield Server(address, read_until(process, METRICS)[1], process)


@contextlib.contextmanager
def real_pool() -> Iterator[RealPool]:
    with real_router() as router, real_worker(router) as worker:
        wait_ready(router, worker)
        yield RealPool(router, worker)


def wait_ready(router: Server, worker: Server, timeout_s: float = 60) -> None:
    """Until the router has seen the canary of this very process come back."""
    give_up_s = time.monotonic() + timeout_s
    with GraphpoolClient(router.address) as client, GraphpoolClient(worker.address) as direct:
        incarnation = direct.server_info().id
        while time.monotonic() < give_up_s:
            states = {load.incarnation: load.state for load in client.loads()}
            if states.get(incarnation) == control_pb2.REPLICA_STATE_READY:
                return
            time.sleep(0.05)
    raise AssertionError(f"the worker was not ready within {timeout_s} s")


class Reference:
    """The same weights in transformers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        from worker.model.source import resolve_model

        directory = resolve_model("smollm2-135m").directory
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        # Nothing of the checkpoint's own sampling.
        self.model.generation_config = GenerationConfig(pad_token_id=self.eos)
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def control_tokens(self) -> dict[str, int]:
        """Text and id of each."""
        added = self.tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def eos(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, messages: list[tuple[str, str]]) -> list[int]:
        plain = [{"role": role, "content": content} for role, content in messages]
        rendered = self.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def greedy(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> tuple[int, ...]:
        """Up to the end-of-sequence token, which is part of it."""
        known = self._answers.get(tuple(prompt), ())
        if len(known) < max_tokens:
            ids = torch.tensor([prompt])
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
            known = self._answers[tuple(prompt)] = tuple(output[0, len(prompt) :].tolist())
        answer = known[:max_tokens]
        return answer if ignore_eos or self.eos not in answer else answer[: answer.index(self.eos) + 1]

    def text(self, ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@cache
def reference() -> Reference:
    """Loaded once a process."""
    # Threads of two processes that wait for each other on few cores cost more than they bring.
    torch.set_num_threads(1)
    return Reference()
