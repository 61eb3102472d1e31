"""Which path of the metrics port shows what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from cluster.security.http import App, StartResponse

SECURITY_HEADERS = [
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
TEXT = "text/plain; charset=utf-8"
FILES = {"/": ("pool.html", "text/html"), "/pool.js": ("pool.js", "text/javascript")}
METRICS, HEALTH, POOL = "/metrics", "/healthz", "/pool.json"

Values = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent for one path."""

    status: str
    kind: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


def with_routes(metrics: App, *, is_serving: Callable[[], bool] | None = None, values: Values | None = None) -> App:
    """Metrics at /metrics; health at /healthz: 200 or 503; with `values` the page at / and its numbers at /pool.json.

    Every other path is 404: a probe of a path that is not there must not pass. Only GET and HEAD are answered.
    """
    replies: dict[str, Callable[[], Reply]] = {}
    if is_serving is not None:
        replies[HEALTH] = partial(_health, is_serving)
    if values is not None:
        replies |= {path: _file(name, kind) for path, (name, kind) in FILES.items()}
        replies[POOL] = partial(_numbers, values)

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        if path == METRICS:
            return metrics(environ, start_response)
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return [b""]
        reply = replies[path]() if path in replies else _nothing_here(sorted((METRICS, *replies)))
        length = ("Content-Length", str(len(reply.body)))
        start_response(reply.status, [("Content-Type", reply.kind), length, *reply.headers])
        return [reply.body if environ.get("REQUEST_METHOD") != "HEAD" else b""]

    return answer


def _file(name: str, kind: str) -> Callable[[], Reply]:
    body = resources.files(__package__).joinpath(name).read_bytes()
    reply = Reply("200 OK", f"{kind}; charset=utf-8", body, SECURITY_HEADERS)
    return lambda: reply


def _numbers(values: Values) -> Reply:
    return Reply("200 OK", "application/json", json.dumps(values()).encode(), SECURITY_HEADERS)


def _health(is_serving: Callable[[], bool]) -> Reply:
    """The words of `grpc.health.v1`. A server whose event loop is stuck serves nobody."""
    try:
        is_well = is_serving()
    except TimeoutError:
        is_well = False
    status, word = ("200 OK", b"SERVING\n") if is_well else ("503 Service Unavailable", b"NOT_SERVING\n")
    return Reply(status, TEXT, word)


def _nothing_here(paths: Sequence[str]) -> Reply:
    return Reply("404 Not Found", TEXT, f"nothing is here; there are {', '.join(paths)}\n".encode())
