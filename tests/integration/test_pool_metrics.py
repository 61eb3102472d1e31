"""What is scraped is what was sent, to the last token."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.core import Metric

from cluster.client import AsyncGraphpoolClient, CallError
from cluster.config import ReplicaConfig
from cluster.metrics.exporter import loop_family
from cluster.metrics.place import place_families
from cluster.metrics.replica import ReplicaMetrics
from cluster.metrics.router import RouterMetrics
from cluster.metrics.rpcs import RpcCounter
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from cluster.replica.start_times import StartTimes
from cluster.router.canary import NUM_TOKENS, PROMPT_LENGTH
from cluster.router.fair_queue import FairGate
from cluster.security.config import SecurityConfig
from cluster.security.guard import Guard
from cluster.security.tenancy import Tenancy
from protos import replica_pb2
from tests.fakes.bad_requests import Case, Target, run_case
from tests.fakes.scrape import Scrape, scrape
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, ONE_TRY, ScriptPool, script_pool
from tests.fakes.tiny_model import tiny_engine, tiny_model
from tests.fakes.waiting import until
from worker.engine_thread import EngineThread
from worker.load import GraphSnapshot, GraphUse, LoadSnapshot, TierLoad

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
PROMPT = (10, 20, 30)
ANY_PORT = "127.0.0.1:0"
ROUTER = replace(FAST, metrics_listen=ANY_PORT)


@contextlib.asynccontextmanager
async def measured_pool(num_replicas: int = 1, **knobs: object) -> AsyncIterator[ScriptPool]:
    replica = ReplicaConfig(metrics_listen=ANY_PORT)
    async with script_pool(
        num_replicas,
        router=ROUTER,
        replica=replica,
        knobs=ScriptKnobs(**knobs),  # type: ignore[arg-type]
    ) as pool:
        yield pool


async def both(pool: ScriptPool) -> tuple[Scrape, Scrape]:
    return await scrape(pool.router.metrics_address), await scrape(pool.replicas[0].server.metrics_address)


async def refused(pool: ScriptPool, **options: object) -> None:
    with contextlib.suppress(CallError):
        await pool.client.generate(**({"prompt": PROMPT, "max_tokens": 5} | options))  # type: ignore[arg-type]


async def send_traffic(pool: ScriptPool) -> None:
    """Nine answers of 76 tokens, six refusals of five kinds."""
    client = pool.client
    await asyncio.gather(*(client.generate(PROMPT, max_tokens=7) for _ in range(5)))
    assert len((await client.generate(PROMPT, max_tokens=4, n=3)).choices) == 3
    for _ in range(2):
        assert sum([len(piece.token_ids) async for piece in client.stream(PROMPT, max_tokens=9)]) == 9
    await client.chat([("user", "x")], max_tokens=11)
    await client.tokenize("abc")
    await refused(pool, n=0)
    await refused(pool, prompt=(1, 999_999))
    await refused(pool, prompt=(2, 999_999))
    await refused(pool, model="another")
    await refused(pool, prompt=(66, 66), max_tokens=5)
    target = Target(address=pool.router.address, vocab_size=1, max_model_len=1, control_tokens={})
    async with grpc.aio.insecure_channel(pool.router.address) as channel:
        await run_case(channel, target, Case(name="noise", method="Generate", code="", raw="ffffffff0102"))


async def test_a_router_and_a_replica_count_exactly_what_was_sent() -> None:
    async with measured_pool(fail_on_prompt=(66, 66)) as pool:
        await send_traffic(pool)
        router, replica = await both(pool)
    assert router.by_labels("rpcs_total", "method", "code") == {
        ("Generate", "OK"): 6,
        ("GenerateStream", "OK"): 2,
        ("Chat", "OK"): 1,
        ("Tokenize", "OK"): 1,
        ("Generate", "INVALID_ARGUMENT"): 4,
        ("Generate", "NOT_FOUND"): 1,
        ("Generate", "INTERNAL"): 1,
    }
    # Nine answers, two prompts outside the vocabulary, one row of NaN.
    assert router.value("placements_total") == 12
    assert router.value("repeated_placements_total") == 0
    assert router.value("router_time_to_first_token_seconds_count") == 10
    assert router.value("router_seconds_count") == 10
    assert router.value("streams") == 0
    assert router.by_labels("replicas", "state") == {("ready",): 1}
    assert router.by_labels("ready_replicas", "readiness") == {("eager",): 1}
    # The replica also answered the router's canary.
    assert replica.by_labels("requests_total", "code") == {
        ("OK",): 9 + 1,
        ("INVALID_ARGUMENT",): 2,
        ("INTERNAL",): 1,
    }
    chat = len("<|role|>") // 8 + len("user") + len("x") + 2
    assert replica.value("prompt_tokens_total") == 8 * len(PROMPT) + chat + PROMPT_LENGTH + 2
    answered = 5 * 7 + 3 * 4 + 2 * 9 + 11
    assert replica.value("generation_tokens_total") == answered + NUM_TOKENS + 2
    assert replica.value("time_to_first_token_seconds_count") == 11
    for stage in ("queue", "prefill", "decode"):
        assert replica.value(f"request_{stage}_seconds_count") == 10
    assert replica.by_labels("rpcs_total", "method", "code") == {("Tokenize", "OK"): 1}


async def test_every_token_but_those_of_first_pieces_has_a_latency() -> None:
    async with measured_pool(step_s=0.002) as pool:
        client = pool.client
        pieces = [piece async for piece in client.stream(PROMPT, max_tokens=50)]
        _, replica = await both(pool)
    canary = replica.value("inter_token_latency_seconds_count") - sum(len(piece.token_ids) for piece in pieces[1:])
    assert canary in (0, 1)  # its two tokens come in two pieces, or in one on a busy machine
    mean_s = replica.value("inter_token_latency_seconds_sum") / replica.value("inter_token_latency_seconds_count")
    assert 0.001 < mean_s < 0.5
    assert replica.value("inter_token_latency_seconds_bucket", le="0.001") < 25


async def test_requests_show_while_they_run_and_an_end_by_the_client_is_counted_as_such() -> None:
    async with measured_pool(step_s=0.005, max_rows=2) as pool, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(pool.client.stream(PROMPT, max_tokens=3000)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=3, timeout_s=2.0))
        await until(lambda: pool.replicas[0].engine.load().waiting == 1)
        router, replica = await both(pool)
        assert router.value("streams") == 3
        assert (replica.value("running_sequences"), replica.value("waiting_sequences")) == (2, 1)
        assert replica.value("queue_age_seconds") > 0
        assert replica.value("free_blocks") == 0 < replica.value("blocks")
        with pytest.raises(CallError):
            await waiting
        for stream in streams:
            stream.cancel()
        await until(lambda: pool.router.pool.num_live == 0 and pool.replicas[0].server.num_live == 0)
        router, replica = await both(pool)
    assert router.by_labels("rpcs_total", "method", "code") == {
        ("GenerateStream", "CANCELLED"): 2,
        ("Generate", "DEADLINE_EXCEEDED"): 1,
    }
    assert replica.value("requests_total", code="OK") == 1  # the canary
    ended = replica.by_labels("requests_total", "code")
    # The router cancels what is late, unless the replica was quicker to notice.
    assert ended[("CANCELLED",)] + ended.get(("DEADLINE_EXCEEDED",), 0) == 3
    assert (replica.value("running_sequences"), replica.value("waiting_sequences")) == (0, 0)


async def test_a_request_that_is_placed_again_counts_twice_as_placed_and_once_as_answered() -> None:
    async with measured_pool(2) as pool:
        stuck = pool.replicas[0]
        stuck.engine.knobs.is_hanging = True
        answers = [asyncio.create_task(pool.client.generate(PROMPT, max_tokens=5)) for _ in range(4)]
        await until(lambda: stuck.server.num_live == 2)
        await stuck.server.stop()
        assert [len(answer.token_ids) for answer in await asyncio.gather(*answers)] == [5] * 4
        await until(lambda: pool.num_ready == 1)
        router = await scrape(pool.router.metrics_address)
    assert router.value("placements_total") == 6
    assert router.value("repeated_placements_total") == 2
    assert router.by_labels("rpcs_total", "method", "code") == {("Generate", "OK"): 4}
    assert router.value("replicas", state="ready") == 1


async def test_a_call_to_a_replica_itself_counts_there() -> None:
    async with measured_pool() as pool, AsyncGraphpoolClient(pool.replicas[0].server.address, ONE_TRY) as direct:
        await direct.generate(PROMPT, max_tokens=6)
        with pytest.raises(CallError):
            await direct.generate(PROMPT, n=0)
        router, replica = await both(pool)
    assert replica.by_labels("rpcs_total", "method", "code") == {
        ("Generate", "OK"): 1,
        ("Generate", "INVALID_ARGUMENT"): 1,
    }
    assert replica.value("generation_tokens_total") == 6 + NUM_TOKENS
    assert router.by_labels("rpcs_total", "method", "code") == {}


async def test_replays_misses_and_padding_of_a_worker_with_graphs_are_scraped_by_key() -> None:
    engine = tiny_engine(tiny_model(), graphs="fake", max_batch=4, prefill_chunk=16)
    while engine.prepare_next():
        pass
    events = EventFanout()
    thread = EngineThread(engine, events)
    server = ReplicaServer(ReplicaConfig(metrics_listen=ANY_PORT), thread, events=events)
    await server.start()
    async with AsyncGraphpoolClient(server.address, ONE_TRY) as client:
        for first in (1, 6, 7):
            await client.generate((first, 2, 3, 4, 5), max_tokens=4, temperature=0.0, ignore_eos=True)
    await until(lambda: sum(use.replays for use in thread.load().graphs.uses) == 12)
    replica = await scrape(server.metrics_address)
    await server.stop()
    thread.stop()
    replays = replica.by_labels("graph_replays_total", "phase", "tier", "bucket", "variant")
    assert replays == {("prefill", "0", "16", "fresh"): 3, ("decode", "16", "1", "default"): 9}
    assert replica.by_labels("steps_total", "runner") == {("graph",): 12}
    assert replica.value("graph_padding_rows_total") == 3 * (16 - 5)
    assert replica.by_labels("graph_misses_total", "reason") == {}
    assert replica.value("readiness") == 2
    assert replica.value("graph_capture_seconds") > 0
    assert (replica.value("prompt_tokens_total"), replica.value("generation_tokens_total")) == (15, 12)
    assert (replica.value("prefix_cache_queries_total"), replica.value("prefix_cache_hits_total")) == (15, 0)


async def test_nothing_a_client_says_is_in_a_label() -> None:
    secret = "canary-7f3a"
    async with measured_pool() as pool:
        await pool.client.generate(secret, max_tokens=3, request_id=f"id-{secret}", stop=[secret])
        await refused(pool, model=secret)
        untyped: Any = grpc.aio.insecure_channel(pool.router.address)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await untyped.unary_unary(f"/graphpool.v1.GenerationService/{secret}")(b"")
        await untyped.close(None)
        texts = [reading.text for reading in await both(pool)]
    assert all("graphpool_" in text and secret not in text for text in texts)


async def test_metrics_are_off_unless_asked_for() -> None:
    async with script_pool(1) as pool:
        assert pool.router.metrics_address == pool.replicas[0].server.metrics_address == ""


def documented(heading: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """(name, type, labels) of each row of the table below a heading."""
    text = OPERATIONS.read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `graphpool_(\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    return {(name, kind, tuple(re.findall(r"\w+", labels))) for name, kind, labels in rows}


LOAD = LoadSnapshot(
    tiers=(TierLoad(8, 1, 2),), graphs=GraphSnapshot(uses=(GraphUse("decode", 8, 1, "default", 1),), misses=(("x", 1),))
)


def router_families() -> Iterator[Metric]:
    guard = Guard(SecurityConfig())
    guard.refused["UNAUTHENTICATED"] = 1
    tenancy = Tenancy(guard, FairGate(lambda: 1))
    tenancy._tokens["acme"] = tenancy._refused["acme"] = 1
    tenancy._account("acme")
    yield from RouterMetrics().families([], 0, failing={"GPU-1": 2})
    yield from tenancy.families()


@pytest.mark.parametrize("heading", ["Metrics of a replica", "Metrics of a router"])
async def test_the_tables_of_the_operations_page_name_every_metric_and_no_other(heading: str) -> None:
    rpcs, metrics = RpcCounter("x"), ReplicaMetrics()
    rpcs._counts["Generate", "OK"] = 1
    metrics.ended(grpc.StatusCode.OK)
    times = StartTimes()
    times.over("listening")
    place = place_families(replica_pb2.ReplicaHello(), times)
    own = (*metrics.families(LOAD), *place) if heading.endswith("replica") else router_families()
    served = set()
    for family in (*own, rpcs.family(), loop_family()):
        labels = tuple(label for label in family.samples[0].labels if label != "le")
        suffix = "_total" if family.type == "counter" else ""
        served.add((family.name.removeprefix("graphpool_") + suffix, family.type, labels))
    assert documented(heading) == served
