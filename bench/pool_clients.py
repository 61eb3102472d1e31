"""Clients that ask as a Poisson process says, whether or not earlier answers have ended; each process of them is one `drive`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from protos import generation_pb2, generation_pb2_grpc
from tests.fakes.script import script

NUM_CHANNELS = 4
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one process of clients asks for. Times are of time.monotonic, which all processes of a machine share."""

    address: str
    rate_per_s: float
    begin_s: float
    """First arrival."""
    count_from_s: float
    """What comes before is a warm-up."""
    end_s: float
    """Last arrival, and the end of what is counted."""
    num_tokens: int
    seed: int


@dataclass(slots=True)
class Seen:
    """What its clients got."""

    due: int = 0
    """Requests within the time that counts."""
    tokens: int = 0
    """That came within the time that counts."""
    first_token_s: list[float] = field(default_factory=list)
    """From the moment a request was due, of those due within that time."""
    answers: int = 0
    """Whole and right ones."""
    wrong: int = 0
    """Ended OK, but not as the script says."""
    failed: dict[str, int] = field(default_factory=dict)
    """By status."""

    def add(self, other: Seen) -> None:
        """Those of another process too."""
        self.due += other.due
        self.tokens += other.tokens
        self.first_token_s += other.first_token_s
        self.answers += other.answers
        self.wrong += other.wrong
        for code, count in other.failed.items():
            self.failed[code] = self.failed.get(code, 0) + count

    def first_token_ms(self, share: float) -> float:
        """At a quantile; 0 where nothing came."""
        ordered = sorted(self.first_token_s)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def arrivals(rate_per_s: float, begin_s: float, end_s: float, seed: int) -> list[float]:
    """When requests are due."""
    draw, found, due_s = random.Random(seed), [], begin_s
    while (due_s := due_s + draw.expovariate(rate_per_s)) < end_s:
        found.append(due_s)
    return found


def drive(offer: Offer) -> Seen:
    """Ask, and wait for every answer."""
    return asyncio.run(_drive(offer))


def warm(_: int) -> None:
    """Make a process import what it needs."""
    time.sleep(0.2)


async def _drive(offer: Offer) -> Seen:
    seen = Seen()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(offer.address, options=options) for _ in range(NUM_CHANNELS)]
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    async with asyncio.TaskGroup() as tasks:
        for number, due_s in enumerate(arrivals(offer.rate_per_s, offer.begin_s, offer.end_s, offer.seed)):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            seen.due += due_s >= offer.count_from_s
            tasks.create_task(_ask(stubs[number % NUM_CHANNELS], offer, seen, number, due_s))
    for channel in channels:
        await channel.close(None)
    return seen


async def _ask(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub, offer: Offer, seen: Seen, number: int, due_s: float
) -> None:
    prompt, seed = [3 + number % 100] * 16, (offer.seed << 20) + number
    sampling = generation_pb2.SamplingParams(max_tokens=offer.num_tokens, seed=seed)
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=prompt), sampling=sampling)
    received: list[int] = []
    try:
        async for response in stub.GenerateStream(request, timeout=DEADLINE_S):
            _count(offer, seen, response.choices[0].token_ids if response.choices else (), due_s, is_first=not received)
            received += response.choices[0].token_ids if response.choices else ()
    except grpc.aio.AioRpcError as error:
        seen.failed[error.code().name] = seen.failed.get(error.code().name, 0) + 1
        return
    is_right = tuple(received) == script(prompt, seed, 0, offer.num_tokens)
    seen.answers += is_right
    seen.wrong += not is_right


def _count(offer: Offer, seen: Seen, token_ids: Sequence[int], due_s: float, *, is_first: bool) -> None:
    now_s = time.monotonic()
    if token_ids and offer.count_from_s <= now_s < offer.end_s:
        seen.tokens += len(token_ids)
    if token_ids and is_first and due_s >= offer.count_from_s:
        seen.first_token_s.append(now_s - due_s)
