"""How every gRPC channel and server of the project is set up."""

from __future__ import annotations

import errno
import json
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from grpc_reflection.v1alpha import reflection

from cluster.config import LINK_MESSAGE_BYTES, MESSAGE_BYTES, ClientConfig, Keepalive, is_loopback, split_address
from cluster.malformed import RefuseMalformed
from cluster.security.config import SecurityConfig
from cluster.security.identity import identity_of

METADATA_BYTES = 8 * 1024
C_INT_MAX = 2**31 - 1
MAX_CONNECTIONS = 4096
"""A server accepts no more at the same time: each costs memory before anybody has said who it is."""
MAX_PING_STRIKES = 2
"""Pings that come too soon, before a peer is cut off."""
HANDSHAKE_TIMEOUT_S = 10
"""For TLS and the first HTTP/2 settings of a new connection."""
IDLE_TIMEOUT_S = 600
"""A connection without a call for this long is closed; clients open another when they need one."""


@dataclass(frozen=True, slots=True)
class ConnectionAge:
    """When a connection is told to go, and when what still runs on it is ended."""

    max_s: float = math.inf
    grace_s: float = math.inf


NO_AGE = ConnectionAge()

ServerInterceptor: TypeAlias = "grpc.aio.ServerInterceptor[Any, Any]"
Options = list[tuple[str, int | str]]


def create_server(
    *,
    keepalive: Keepalive,
    max_streams: int,
    message_bytes: int,
    watchers: Sequence[ServerInterceptor] = (),
    age: ConnectionAge = NO_AGE,
) -> grpc.aio.Server:
    """A server that survives quiet streams, cuts off hostile pingers and never shares its port silently.

    `watchers` see every call, also those whose bytes are refused. Past its `age` a connection takes no new calls.
    """
    # A stream more than the limit of requests, so that the refusal itself can be sent, and room for health watchers.
    streams = max_streams + 64
    options: Options = [
        *_common(keepalive, message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(keepalive.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.max_connection_age_ms", _ms(age.max_s)),
        ("grpc.max_connection_age_grace_ms", _ms(age.grace_s)),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_TIMEOUT_S),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_TIMEOUT_S),
        # No compressed messages: small ones that grow a thousandfold are an attack, and tokens gain nothing by it.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]
    return grpc.aio.server(options=options, interceptors=(*watchers, RefuseMalformed()))


def bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen there, with TLS if there are credentials; returns the port. Raises OSError when that is not possible."""
    try:
        port: int = (
            server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
        )
    except RuntimeError as error:
        raise OSError(
            errno.EADDRINUSE, f"cannot listen at {listen}: the port is taken or the host is not here"
        ) from error
    return port


def check_free(listen: str) -> None:
    """Raise OSError when nobody could listen there now: found out before work that takes minutes. "" is free.

    Whoever is there a moment later is found when it is really listened at.
    """
    if not listen:
        return
    host, port = split_address("listen", listen)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        raise OSError(
            errno.EADDRINUSE, f"cannot listen at {listen}: the port is taken or the host is not here"
        ) from error


def open_link_channel(
    address: str, keepalive: Keepalive, security: SecurityConfig | None = None, *, peer: str = ""
) -> grpc.aio.Channel:
    """A channel between our own processes. It shares no connection, so a fresh one dials at once.

    With `security` it shows this process's certificate and secret, as they are now, to a `peer` of that name.
    """
    options: Options = [
        *_common(keepalive, LINK_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    channel: grpc.aio.Channel = identity_of(security or SecurityConfig()).open_channel(address, options, peer=peer)
    return channel


def client_options(config: ClientConfig, *, is_alone: bool = True) -> Options:
    """Options of a client's channel, retries included: gRPC itself repeats a call until its first message arrives.

    Where another server can be asked instead, one that is gone is not asked again first.
    """
    return [
        *_common(config.keepalive, MESSAGE_BYTES),
        ("grpc.enable_retries", 1 if config.max_attempts > 1 else 0),
        ("grpc.service_config", json.dumps(_service_config(config, is_alone=is_alone))),
    ]


def offer_reflection(
    server: grpc.aio.Server, listen: str, services: Sequence[str], *, is_guarded: bool = False
) -> None:
    """Let callers on this machine, or those who have said who they are, ask for the schema."""
    if is_guarded or is_loopback(split_address("listen", listen)[0]):
        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)


def _service_config(config: ClientConfig, *, is_alone: bool) -> dict[str, object]:
    services = ("graphpool.v1.GenerationService", "graphpool.v1.ControlService")
    method: dict[str, object] = {"name": [{"service": service} for service in services]}
    if config.max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": config.max_attempts,
            "initialBackoff": f"{config.backoff_min_s:.3f}s",
            "maxBackoff": f"{config.backoff_max_s:.3f}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"] if is_alone else ["RESOURCE_EXHAUSTED"],
        }
    return {"methodConfig": [method], "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1}}


def _common(keepalive: Keepalive, message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.keepalive_time_ms", _ms(keepalive.time_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    return C_INT_MAX if seconds == math.inf else min(max(1, round(1000 * seconds)), C_INT_MAX)
