"""An HTTP port for metrics that asks who calls, does not wait for slow callers and serves a bounded number of them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cluster.errors import Unauthenticated
from cluster.security.caller import Role
from cluster.security.guard import Guard
from cluster.security.tls import HttpContext
from cluster.security.tokens import bearer

MAX_CALLERS = 32
IDLE_S = 10.0
POLL_S = 0.05
ROLES = (Role.MONITOR, Role.OPERATOR, Role.ROUTER)

StartResponse = Callable[..., Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class GuardedHttp:
    """Serves one WSGI app on a thread of its own until `stop`. Raises OSError for a port that is taken."""

    def __init__(self, host: str, port: int, app: App, guard: Guard | None) -> None:
        context = None
        if guard is not None and guard.certificates is not None:
            context = HttpContext(guard.certificates, guard.config)
            context.get()
        self._server = _server_class(host)((host, port), _QuietRequest, context)
        self._server.set_app(app if guard is None else guarded(app, guard))
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="graphpool-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def stop(self) -> None:
        """Hang up."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def guarded(app: App, guard: Guard) -> App:
    """The app, for monitors and operators of a guard that asks who calls."""

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        problem = _problem(environ, guard)
        if problem is None:
            return app(environ, start_response)
        status, text = problem
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("WWW-Authenticate", "Bearer")]
        start_response(status, headers)
        return [text.encode() + b"\n"]

    return answer


def _problem(environ: dict[str, Any], guard: Guard) -> tuple[str, str] | None:
    if guard.tenants is None and not guard.pool_token:
        return None  # a certificate, where one is asked for, was verified by TLS
    try:
        caller = guard.caller_of_token(bearer([("authorization", environ.get("HTTP_AUTHORIZATION", ""))]))
    except Unauthenticated:
        return "401 Unauthorized", "a token is needed: Authorization: Bearer ..."
    if not caller.is_any(*ROLES):
        return "403 Forbidden", f"this needs one of the roles {', '.join(ROLES)}"
    return None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], request: type[WSGIRequestHandler], context: HttpContext | None
    ) -> None:
        self._context = context
        self._callers = BoundedSemaphore(MAX_CALLERS)
        super().__init__(address, request)

    def server_bind(self) -> None:
        # Without the look-up of its own name that HTTPServer does, which may take seconds. What is left of the answers of
        # an earlier process at this port is no reason not to listen: it lies there for a minute.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        connection.settimeout(IDLE_S)
        if self._context is not None:
            # The handshake waits for the caller: it belongs on the caller's thread.
            connection = self._context.get().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._callers.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._callers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers that break off are no error of ours."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietRequest(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the base class
        """Requests are not logged."""


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server
