from __future__ import annotations

import asyncio
import socket
import urllib.error
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from cluster.config import ReplicaConfig, RouterConfig
from cluster.local_pool import LocalPoolConfig, next_metrics_address
from cluster.metrics import exporter
from cluster.metrics.answer_times import AnswerTimes
from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.families import SECONDS, Histogram, plain_gauge
from cluster.metrics.replica import ReplicaMetrics
from cluster.served_place import metrics_address
from protos import generation_pb2
from tests.fakes.scrape import fetch, scrape
from worker.load import LoadSnapshot


def cumulative(histogram: Histogram) -> dict[str, float]:
    family = histogram.family("x", "x")
    return {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}


def test_a_value_on_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert cumulative(histogram) == {"1.0": 2, "2.0": 4, "+Inf": 5}


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50))))
def test_a_histogram_counts_every_observation_as_often_as_it_occurred(values: list[tuple[float, int]]) -> None:
    once, often = Histogram(), Histogram()
    for value, times in values:
        often.observe(value, times)
        for _ in range(times):
            once.observe(value)
    assert cumulative(often) == cumulative(once)
    assert cumulative(often)["+Inf"] == sum(times for _, times in values)
    (total,) = [sample.value for sample in often.family("x", "x").samples if sample.name.endswith("_sum")]
    assert total == pytest.approx(sum(value * times for value, times in values))


def test_the_buckets_begin_below_a_millisecond_and_reach_a_minute() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert SECONDS[:7] == (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01)
    assert SECONDS[-1] == 60


def piece(sequence: int, **tokens: int) -> generation_pb2.GenerateResponse:
    message = generation_pb2.GenerateResponse(sequence=sequence)
    if sequence == 0:
        message.usage.prompt_tokens = 11
    for name, count in tokens.items():
        message.choices.add(index=int(name[1:]), token_ids=range(count))
    return message


def value_of(metrics: ReplicaMetrics, name: str) -> float:
    families = metrics.families(LoadSnapshot())
    samples = (sample for family in families for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == f"graphpool_{name}")


def test_tokens_after_the_first_piece_of_a_choice_have_a_distance_to_the_one_before() -> None:
    metrics, times = ReplicaMetrics(), AnswerTimes()
    for message in (piece(0, c0=1, c1=1), piece(1, c0=5), piece(2, c0=2, c1=9, c2=3), piece(3, c2=1)):
        metrics.sent(times, message)
    assert value_of(metrics, "generation_tokens_total") == 22
    assert value_of(metrics, "prompt_tokens_total") == 11
    assert value_of(metrics, "time_to_first_token_seconds_count") == 1
    # All but the first piece of each of three choices: 22 - 1 - 1 - 3.
    assert value_of(metrics, "inter_token_latency_seconds_count") == 17


def one_gauge() -> Iterator[Metric]:
    asyncio.get_running_loop()  # raises when it is collected anywhere but on the loop
    yield plain_gauge("one", "One.", 1)


async def test_metrics_are_collected_on_the_event_loop_and_gone_after_the_end() -> None:
    metrics = MetricsExporter("127.0.0.1:0", one_gauge)
    assert metrics.address == ""
    metrics.start()
    address = metrics.address
    assert (await scrape(address)).value("one") == 1
    await metrics.stop()
    assert metrics.address == ""
    with pytest.raises(urllib.error.URLError):
        await scrape(address)


async def test_without_an_address_nothing_listens() -> None:
    metrics = MetricsExporter("", one_gauge)
    metrics.start()
    assert metrics.address == ""
    await metrics.stop()


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"{listen} for metrics"):
            MetricsExporter(listen, one_gauge).start()


async def test_a_port_that_was_scraped_a_moment_ago_can_be_listened_on_again() -> None:
    first = MetricsExporter("127.0.0.1:0", one_gauge)
    first.start()
    address = first.address
    assert (await scrape(address)).value("one") == 1  # the server hung up first: the kernel remembers it for a minute
    await first.stop()
    second = MetricsExporter(address, one_gauge)
    second.start()
    assert (await scrape(address)).value("one") == 1
    await second.stop()


async def test_the_tasks_of_the_loop_that_serves_are_counted() -> None:
    metrics = MetricsExporter("127.0.0.1:0", one_gauge)
    metrics.start()
    before = (await scrape(metrics.address)).value("event_loop_tasks")
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(7)]
    assert (await scrape(metrics.address)).value("event_loop_tasks") == before + 7
    for task in tasks:
        task.cancel()
    await metrics.stop()


async def test_a_scrape_of_a_stuck_loop_fails_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "COLLECT_TIMEOUT_S", 0.1)
    metrics = MetricsExporter("127.0.0.1:0", one_gauge)
    metrics.start()
    with pytest.raises(urllib.error.HTTPError, match="500"):
        fetch(metrics.address)  # here, so that the loop is stuck
    await metrics.stop()


@pytest.mark.parametrize("config", [RouterConfig, ReplicaConfig])
def test_metrics_for_others_must_be_asked_for_out_loud(config: type[RouterConfig | ReplicaConfig]) -> None:
    assert config().metrics_listen == ""
    assert config(metrics_listen="127.0.0.1:9090").metrics_listen == "127.0.0.1:9090"
    with pytest.raises(ValueError, match=r"metrics_listen '10\.0\.0\.1:9090' can be reached by others"):
        config(metrics_listen="10.0.0.1:9090")
    assert config(metrics_listen="10.0.0.1:9090", insecure=True)


def test_replicas_of_a_node_take_the_ports_after_each_other() -> None:
    assert [metrics_address("127.0.0.1:9091", rank) for rank in range(3)] == [
        *("127.0.0.1:9091", "127.0.0.1:9092", "127.0.0.1:9093")
    ]
    assert metrics_address("127.0.0.1:0", 2) == "127.0.0.1:0"
    assert metrics_address("", 2) == ""


def test_the_replicas_of_a_local_pool_come_after_its_router() -> None:
    assert next_metrics_address("[::1]:9090") == "[::1]:9091"
    assert next_metrics_address("127.0.0.1:0") == "127.0.0.1:0"
    assert next_metrics_address("") == ""
    with pytest.raises(ValueError, match="65534"):
        LocalPoolConfig(router=RouterConfig(metrics_listen="127.0.0.1:65534"), num_replicas=2)
