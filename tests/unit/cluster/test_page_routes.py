"""Paths of the metrics port: what is not there is not answered, and health is a status that probes understand."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client.core import Metric

from cluster.metrics import exporter
from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.families import plain_gauge
from cluster.page.routes import with_routes
from tests.fakes.scrape import fetch


def metrics_app(_environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [])
    return [b"graphpool_one 1"]


def ask(
    path: str,
    method: str = "GET",
    *,
    is_serving: Callable[[], bool] | None = None,
    values: Callable[[], Mapping[str, Any]] | None = None,
) -> tuple[str, bytes]:
    statuses: list[str] = []
    app = with_routes(metrics_app, is_serving=is_serving, values=values)
    body = app({"PATH_INFO": path, "REQUEST_METHOD": method}, lambda status, _headers: statuses.append(status))
    return statuses[0][:3], b"".join(body)


def stuck() -> bool:
    raise TimeoutError


@pytest.mark.parametrize("path", ["/health", "/healthz/", "/metrics/", "/favicon.ico", "/../etc/passwd"])
def test_a_path_that_is_not_there_is_404_and_names_those_that_are(path: str) -> None:
    status, body = ask(path, is_serving=lambda: True, values=dict)
    assert (status, body) == ("404", b"nothing is here; there are /, /healthz, /metrics, /pool.js, /pool.json\n")


def test_without_a_page_there_are_metrics_and_health_alone() -> None:
    assert ask("/metrics") == ("200", b"graphpool_one 1")
    assert ask("/", is_serving=lambda: True)[0] == "404"
    assert ask("/pool.json", is_serving=lambda: True)[0] == "404"
    assert ask("/healthz")[0] == "404"


@pytest.mark.parametrize(
    ("is_serving", "answer"),
    [
        (lambda: True, ("200", b"SERVING\n")),
        (lambda: False, ("503", b"NOT_SERVING\n")),
        (stuck, ("503", b"NOT_SERVING\n")),
    ],
)
def test_health_is_a_status_code(is_serving: Callable[[], bool], answer: tuple[str, bytes]) -> None:
    assert ask("/healthz", is_serving=is_serving) == answer
    assert ask("/healthz", "HEAD", is_serving=is_serving) == (answer[0], b"")
    assert ask("/healthz", "POST", is_serving=is_serving)[0] == "405"


def test_the_page_and_its_numbers_are_there_when_there_are_values() -> None:
    assert b"<title>graphpool</title>" in ask("/", values=dict)[1]
    assert json.loads(ask("/pool.json", values=lambda: {"a": 1})[1]) == {"a": 1}


def one_gauge() -> Iterator[Metric]:
    yield plain_gauge("one", "One.", 1)


async def test_health_of_a_stuck_loop_fails_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "COLLECT_TIMEOUT_S", 0.1)
    metrics = MetricsExporter("127.0.0.1:0", one_gauge, is_serving=lambda: True)
    metrics.start()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(metrics.address, "/healthz")  # here, so that the loop is stuck
    await metrics.stop()
