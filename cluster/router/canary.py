"""The generation that admits a replica to the pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable
from typing import Protocol

from cluster.answers import AnswerFold
from cluster.codec import AnyRequest
from cluster.errors import CanaryFailed, ClusterError
from protos import control_pb2, generation_pb2

NUM_TOKENS = 2
PROMPT_LENGTH = 4


class CanaryStream(AsyncIterable[generation_pb2.GenerateResponse], Protocol):
    """The answer on its way."""

    def close(self) -> None:
        """End it."""


class CanaryTarget(Protocol):
    """A replica that can be given a request."""

    name: str
    model: control_pb2.ModelInfo | None

    def open(
        self, request: AnyRequest, *, attempt: int, timeout_s: float | None, prompt_cost: int, cost: int
    ) -> CanaryStream:
        """Give it a request."""


async def run_canary(target: CanaryTarget, *, timeout_s: float) -> None:
    """A short greedy generation by token ids, through the path that requests take. Raises CanaryFailed."""
    if target.model is None:
        raise CanaryFailed(target.name, "it is not attached")
    request = canary_request(target.model.vocab_size)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _answer(target, request, timeout_s)
    except TimeoutError as error:
        raise CanaryFailed(target.name, f"no answer in {timeout_s:.1f} s") from error
    except ClusterError as error:
        raise CanaryFailed(target.name, str(error)) from error
    _check(target, answer)


def canary_request(vocab_size: int) -> generation_pb2.GenerateRequest:
    """The same for every replica of a model."""
    ids = [position % max(vocab_size, 1) for position in range(1, PROMPT_LENGTH + 1)]
    sampling = generation_pb2.SamplingParams(
        max_tokens=NUM_TOKENS, min_tokens=0, temperature=0.0, n=1, seed=0, ignore_eos=True, repetition_penalty=1.0
    )
    return generation_pb2.GenerateRequest(
        request_id="canary", token_ids=generation_pb2.TokenIds(ids=ids), sampling=sampling
    )


async def _answer(
    target: CanaryTarget, request: generation_pb2.GenerateRequest, timeout_s: float
) -> generation_pb2.GenerateResponse:
    fold = AnswerFold()
    cost = PROMPT_LENGTH + NUM_TOKENS
    with contextlib.closing(
        target.open(request, attempt=1, timeout_s=timeout_s, prompt_cost=PROMPT_LENGTH, cost=cost)
    ) as stream:
        async for piece in stream:
            fold.add(piece)
    return fold.result()


def _check(target: CanaryTarget, answer: generation_pb2.GenerateResponse) -> None:
    vocab_size = target.model.vocab_size if target.model is not None else 0
    ids = list(answer.choices[0].token_ids) if len(answer.choices) == 1 else []
    if len(ids) != NUM_TOKENS or any(token_id >= vocab_size for token_id in ids):
        raise CanaryFailed(target.name, f"it answered {len(ids)} of {NUM_TOKENS} tokens, or tokens it does not have")
