"""Answers of the embedded model whose worker is killed under way, against the same answers undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cluster.client import Answer, GraphpoolClient
from tests.fakes.real_pool import Server, real_router, real_worker, wait_ready

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PROMPT = "Once upon a time there was a lighthouse keeper who"
NUM_TOKENS = 28
CASES: dict[str, dict[str, Any]] = {
    "two seeded choices, logprobs": {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": 2, "ignore_eos": True},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "min_tokens": 20,
    },
    "greedy, stop strings": {"temperature": 0.0, "stop": ["\n\n", "xyzzy", "the end of the"], "ignore_eos": True},
}
KILLS = [
    ("two seeded choices, logprobs", 1),
    ("two seeded choices, logprobs", 30),
    ("penalties", 17),
    ("greedy, stop strings", 12),
]
"""The case, and the tokens that its client has by then."""


class TwoWorkers:
    """A router and two workers of the embedded model, of which one may be killed; the next test has another."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.router = stack.enter_context(real_router())
        self._workers: dict[str, Server] = {}

    def make_whole(self) -> None:
        """Start what is not there."""
        for name in {"one", "two"} - self._workers.keys():
            worker = self._stack.enter_context(real_worker(self.router, name=name, options=("--deterministic",)))
            wait_ready(self.router, worker, timeout_s=120)
            self._workers[name] = worker

    def client(self) -> GraphpoolClient:
        return GraphpoolClient(self.router.address)

    def kill_the_one_that_answers(self, client: GraphpoolClient) -> str:
        """Returns its name."""
        (name,) = [load.replica for load in client.loads() if load.router_streams]
        process = self._workers.pop(name).process
        process.kill()
        process.wait()
        return name


@pytest.fixture(scope="module")
def pool() -> Iterator[TwoWorkers]:
    with ExitStack() as stack:
        yield TwoWorkers(stack)


def merged(pieces: list[Answer]) -> dict[int, tuple[list[int], str, list[Any], Any]]:
    """Of each choice: tokens, text, log-probabilities, and how it ended."""
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    found: dict[int, tuple[list[int], str, list[Any], Any]] = {}
    for piece in pieces:
        for choice in piece.choices:
            tokens, text, logprobs, end = found.get(choice.index, ([], "", [], None))
            assert end is None, "it goes on after its end"
            if choice.finish_reason is not None:
                end = (choice.finish_reason, choice.stop_string, choice.stop_token_id)
            found[choice.index] = (
                [*tokens, *choice.token_ids],
                text + choice.text,
                [*logprobs, *choice.logprobs],
                end,
            )
    usage = pieces[-1].usage
    assert usage is not None
    assert usage.completion_tokens == sum(len(tokens) for tokens, *_ in found.values())
    return found


@pytest.mark.parametrize(("case", "kill_after"), KILLS)
def test_an_answer_whose_worker_is_killed_is_the_answer_it_would_have_been(
    case: str, kill_after: int, pool: TwoWorkers
) -> None:
    pool.make_whole()
    pieces: list[Answer] = []
    killed = ""
    with pool.client() as client:
        expected = merged(list(client.stream(PROMPT, max_tokens=NUM_TOKENS, **CASES[case])))
        for piece in client.stream(PROMPT, max_tokens=NUM_TOKENS, **CASES[case]):
            pieces.append(piece)
            if not killed and sum(len(choice.token_ids) for one in pieces for choice in one.choices) >= kill_after:
                killed = pool.kill_the_one_that_answers(client)
    execution = pieces[-1].execution
    assert execution is not None
    assert (execution.attempts, execution.replica != killed) == (2, True)
    assert merged(pieces) == expected
