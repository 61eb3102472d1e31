"""Requests that come whether or not earlier ones have been answered, and what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.criticality import KEY
from cluster.status import PUSHBACK_KEY
from protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

PLAIN_PERIOD_S = 0.02
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was sent, how long it took, how it ended."""

    sent_s: float
    took_s: float
    code: grpc.StatusCode
    criticality: str
    pushback_ms: int = 0


@dataclass(slots=True)
class Flood:
    """All requests of one run."""

    seconds: float
    offered_per_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    """Times of the plainest call there is, made all the while: what the machine itself takes."""

    @property
    def codes(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter(outcome.code.name for outcome in self.outcomes)

    @property
    def goodput(self) -> float:
        """Answers a second that came whole and in time, between the first second and the last arrival."""
        begin_s = min((one.sent_s for one in self.outcomes), default=0.0)
        ended_s = [one.sent_s + one.took_s - begin_s for one in self.of(grpc.StatusCode.OK)]
        return sum(WARM_UP_S < one <= self.seconds for one in ended_s) / (self.seconds - WARM_UP_S)

    def recovered_s(self, limit_s: float) -> float:
        """From the first request on: when the last one was sent that was not answered within `limit_s`."""
        begin_s = min(one.sent_s for one in self.outcomes)
        bad_s = [
            one.sent_s - begin_s for one in self.outcomes if one.code is not grpc.StatusCode.OK or one.took_s > limit_s
        ]
        return max(bad_s, default=0.0)

    def of(self, code: grpc.StatusCode, criticality: str = "") -> list[Outcome]:
        """Requests that ended so."""
        return [one for one in self.outcomes if one.code is code and criticality in ("", one.criticality)]

    def share_answered(self, criticality: str) -> float:
        """Of the requests of a class."""
        asked = [one for one in self.outcomes if one.criticality == criticality]
        return len(self.of(grpc.StatusCode.OK, criticality)) / max(len(asked), 1)

    def reject_ms(self, quantile: float) -> float:
        """Time to be told to come back later."""
        return 1000 * at(quantile, [one.took_s for one in self.of(grpc.StatusCode.RESOURCE_EXHAUSTED)])

    def plain_ms(self, quantile: float) -> float:
        """Time of the plainest call."""
        return 1000 * at(quantile, self.plain_s)

    def answer_s(self, quantile: float) -> float:
        """Time of a whole answer."""
        return at(quantile, [one.took_s for one in self.of(grpc.StatusCode.OK)])

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"offered {self.offered_per_s:.0f}/s for {self.seconds:.0f} s: goodput {self.goodput:.1f}/s, "
            f"rejects p50 {self.reject_ms(0.5):.1f} ms p99 {self.reject_ms(0.99):.1f} ms "
            f"(plain calls {self.plain_ms(0.5):.1f}, {self.plain_ms(0.99):.1f} ms), {dict(self.codes)}"
        )


def at(quantile: float, values: Sequence[float]) -> float:
    """The value at a quantile; 0 for none."""
    ordered = sorted(values)
    return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else 0.0


async def flood(
    address: str,
    rate_per_s: float,
    seconds: float,
    *,
    rng: random.Random,
    max_tokens: int,
    timeout_s: float,
    criticality: Callable[[], str] = lambda: "critical",
    num_channels: int = 4,
) -> Flood:
    """Poisson arrivals for a while; returns when all requests have ended."""
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    return await flood_over(
        channels, rate_per_s, seconds, rng=rng, max_tokens=max_tokens, timeout_s=timeout_s, criticality=criticality
    )


async def flood_over(
    channels: Sequence[grpc.aio.Channel],
    rate_per_s: float,
    seconds: float,
    *,
    rng: random.Random,
    max_tokens: int,
    timeout_s: float,
    criticality: Callable[[], str] = lambda: "critical",
) -> Flood:
    """The same over channels that are there; closes them."""
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    result = Flood(seconds, rate_per_s)
    tasks: set[asyncio.Task[None]] = set()
    plain = asyncio.create_task(_ask_plainly(channels[0], result.plain_s))
    try:
        start_s = due_s = time.monotonic()
        while due_s < start_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            ask = _ask(stubs[len(result.outcomes) % len(stubs)], result, rng.getrandbits(32), max_tokens, timeout_s)
            task = asyncio.create_task(ask(criticality()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due_s += rng.expovariate(rate_per_s)
        await asyncio.gather(*tasks)
    finally:
        plain.cancel()
        for channel in channels:
            await channel.close(None)
    return result


def _ask(
    stub: generation_pb2_grpc.GenerationServiceStub, result: Flood, seed: int, max_tokens: int, timeout_s: float
) -> Callable[[str], Coroutine[None, None, None]]:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=(10, 20, 30)),
        sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, seed=seed),
    )

    async def ask(criticality: str) -> None:
        sent_s, code, pushback_ms = time.monotonic(), grpc.StatusCode.OK, 0
        try:
            await stub.Generate(request, timeout=timeout_s, metadata=((KEY, criticality),))  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            code = error.code()
            trailers: Any = error.trailing_metadata() or ()
            pushback_ms = int(dict(trailers).get(PUSHBACK_KEY, 0))
        result.outcomes.append(Outcome(sent_s, time.monotonic() - sent_s, code, criticality, pushback_ms))

    return ask


async def _ask_plainly(channel: grpc.aio.Channel, times_s: list[float]) -> None:
    ask: Any = control_pb2_grpc.ControlServiceStub(channel).GetServerInfo
    while True:
        started_s = time.monotonic()
        await ask(control_pb2.GetServerInfoRequest())
        times_s.append(time.monotonic() - started_s)
        await asyncio.sleep(PLAIN_PERIOD_S)
