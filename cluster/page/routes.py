"""Which path of the metrics port shows what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

from cluster.security.http import App, StartResponse

SECURITY_HEADERS = [
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
FILES = {"/": ("pool.html", "text/html"), "/pool.js": ("pool.js", "text/javascript")}

Values = Callable[[], Mapping[str, Any]]


def with_page(metrics: App, values: Values) -> App:
    """The page at /, its numbers at /pool.json, and the metrics at every other path. Only GET and HEAD are answered."""
    files = {
        path: (resources.files(__package__).joinpath(name).read_bytes(), f"{kind}; charset=utf-8")
        for path, (name, kind) in FILES.items()
    }

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        if path not in files and path != "/pool.json":
            return metrics(environ, start_response)
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b""]
        body, kind = files[path] if path in files else (json.dumps(values()).encode(), "application/json")
        start_response("200 OK", [("Content-Type", kind), ("Content-Length", str(len(body))), *SECURITY_HEADERS])
        return [body if environ.get("REQUEST_METHOD") != "HEAD" else b""]

    return answer
