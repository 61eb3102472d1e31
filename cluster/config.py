"""What can be set about routers, replicas and clients. Raises ValueError naming the value that is wrong."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.security.config import ClientSecurity, SecurityConfig
from worker.field_values import check_types, field_value

MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message between a client and a server."""
LINK_MESSAGE_BYTES = MESSAGE_BYTES + 64 * 1024
"""Between a router and a replica: a client's largest request in its envelope must not break the stream of all."""

CRITICALITIES = ("sheddable", "sheddable-plus", "critical", "critical-plus")
POLICY_NAMES = ("least-tokens", "prefix", "tier-fit")
MAX_STREAMS = 1_000_000
"""More than any machine can hold; gRPC counts streams in a C int."""
_NAME = re.compile(r"[!-~]{1,128}")
_HOST = re.compile(r"[!-.0-9;-?A-~]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[!-~]+)?")
"""A name or an IPv4 address, without the marks of a URL; or an IPv6 address."""

MAX_TIMEOUT_S = 1e6
"""Longest deadline of a call: gRPC turns one that is past its clock's end into one that is over."""

DNS, FILE = "dns:", "file:"
"""What a list of routers that may change begins with."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """When an HTTP/2 connection that says nothing is asked whether it is alive, and when it is given up."""

    time_s: float = 10.0
    """Quiet time before a ping."""
    timeout_s: float = 5.0
    """Wait for the ping's answer; then the connection counts as dead."""
    min_ping_interval_s: float = 5.0
    """A server cuts off peers that ping more often than this."""

    def __post_init__(self) -> None:
        _positive(self, "time_s", "timeout_s", "min_ping_interval_s")
        if self.time_s < self.min_ping_interval_s:
            raise ValueError(f"time_s {self.time_s} is under min_ping_interval_s {self.min_ping_interval_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router process."""

    listen: str = "127.0.0.1:50050"
    """host:port; port 0 = any free one. Another host than loopback needs TLS and tokens, or `insecure`."""
    insecure: bool = False
    """Serve without TLS and tokens on an address that others can reach."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Certificates and tokens, of clients' and of replicas' connections and of the metrics."""
    name: str = ""
    """Empty = made at start."""
    replicas: tuple[str, ...] = ()
    """host:port of replicas that do not announce themselves."""
    metrics_listen: str = ""
    """host:port where Prometheus finds metrics over HTTP; empty = nowhere, port 0 = any free one."""
    reflection: bool = True
    """Offer server reflection; on loopback only."""
    max_streams: int = 4096
    """Requests answered at the same time; more are refused with RESOURCE_EXHAUSTED."""
    max_queued_messages: int = 256
    """Messages of one answer that may wait for its reader; more end the request."""
    max_queued_bytes: int = 256 * 1024
    """Bytes of one answer that may wait for its reader, beside a single message however large; more end the request."""
    reader_timeout_s: float = 30.0
    """A reader that takes nothing for this long, while there is something, loses its answer."""
    max_connection_age_s: float = 3600.0
    """A client's connection takes no new calls after this long, give or take a tenth: clients spread over new routers."""
    connection_grace_s: float = 3600.0
    """After that, for what still runs on it."""
    resume_budget: int = 3
    """Losses of its replica that one request survives; a replica that leaves in order takes nothing from it."""
    policy: str = "least-tokens"
    """How a replica is chosen: least-tokens, prefix (prompts that begin alike go together) or tier-fit."""
    affinity_bound: float = 2.0
    """With `prefix`: the chosen replica has at most this many times the work of the one with the least."""
    max_waiting: int = 1024
    """Sequences that may wait in one replica; with all replicas full, more are refused with RESOURCE_EXHAUSTED. The
    lower a request's criticality, the smaller the part of the queue it may use."""
    max_wait_s: float = 120.0
    """A request that would wait longer for its first token is refused at once, as is one that would miss its deadline."""
    wait_for_replica_s: float = 2.0
    """How long a request waits while no replica is ready."""
    wait_to_resume_s: float = 30.0
    """How long an answer that lost its replica waits for another one."""
    quarantine_s: float = 600.0
    """How long requests like one that was proven to end replicas are refused."""
    split_quotas: bool = True
    """Divide tenants' quotas by the number of routers that share replicas; else each router gives out all of them."""
    announce_period_s: float = 1.0
    """How often replicas are told to announce themselves; after three periods of silence a lost one is forgotten."""
    silence_timeout_s: float = 2.0
    """A replica that sends nothing at all for this long, not even its load, is given up."""
    connect_timeout_s: float = 2.0
    """From dialing a replica to its first frame."""
    reconnect_min_s: float = 0.1
    """Pause after a first failed connection; doubles with each further one."""
    reconnect_max_s: float = 5.0
    """Longest pause between connections."""
    breaker_pause_min_s: float = 0.5
    """A replica that failed has a pause before its next canary: at first this long, doubled with each further failure."""
    breaker_pause_max_s: float = 30.0
    """Longest pause before a canary."""
    place_pause_min_s: float = 2.0
    """Where two processes in a row ended badly, on one GPU or under one name, the next waits for so long before its
    canary, while others serve; doubled with each further one."""
    place_pause_max_s: float = 300.0
    """Longest such pause."""
    canary_timeout_s: float = 15.0
    """Longest time of the generation that admits a replica."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Of clients' and of replicas' connections."""

    def __post_init__(self) -> None:
        check_listen("listen", self.listen, insecure=self.insecure or self.security.is_protected)
        if self.metrics_listen:
            check_listen("metrics_listen", self.metrics_listen, insecure=self.insecure or self.security.is_protected)
        for address in self.replicas:
            check_address("replicas", address)
        if self.name:
            check_name("name", self.name)
        _at_least_one(self, "max_streams", "max_waiting", "max_queued_messages", "max_queued_bytes")
        _at_most(self, "max_streams", MAX_STREAMS)
        _positive(self, "announce_period_s", "silence_timeout_s", "connect_timeout_s", "canary_timeout_s")
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"policy {self.policy!r:.60} is not one of {', '.join(POLICY_NAMES)}")
        if not 1 <= self.affinity_bound < math.inf:
            raise ValueError(f"affinity_bound {self.affinity_bound} is under 1")
        _positive(self, "max_wait_s", "reader_timeout_s", "max_connection_age_s", "connection_grace_s")
        _positive(self, "reconnect_min_s", "reconnect_max_s", "breaker_pause_min_s", "breaker_pause_max_s")
        _positive(self, "place_pause_min_s", "place_pause_max_s")
        _not_negative(self, "wait_for_replica_s", "wait_to_resume_s", "resume_budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One replica process: the host of one worker."""

    listen: str = "127.0.0.1:0"
    """host:port; port 0 = any free one. Another host than loopback needs TLS and tokens, or `insecure`."""
    insecure: bool = False
    """Serve without TLS and tokens on an address that others can reach."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Certificates and tokens, of routers' and of direct clients' connections and of the metrics."""
    advertise: str = ""
    """Host that routers dial; empty = that of `listen`."""
    name: str = ""
    """Stable over restarts of the same place; empty = made at start."""
    routers: tuple[str, ...] = ()
    """Routers to announce this replica to: host:port; dns:name:port, which is every address of the name, looked up again
    every 5 s; or file:path, a file with one of these a line, read again when it changes."""
    metrics_listen: str = ""
    """host:port where Prometheus finds metrics over HTTP; empty = nowhere, port 0 = any free one. Under Ray Serve, the
    port of a node's first replica; the others take those after it."""
    reflection: bool = True
    """Offer server reflection; on loopback only."""
    max_streams: int = 4096
    """Requests of direct clients answered at the same time."""
    flush_interval_ms: float = 8.0
    """Least time between two messages of an answer, past the first; 0 = a message for every step."""
    max_flush_interval_ms: float = 64.0
    """The interval widens with the number of live answers, up to this."""
    flush_cost_ms: float = 0.2
    """Router and client time a message costs: the interval is at least twice this for each live answer."""
    load_period_s: float = 0.25
    """A load report goes to every router at least this often."""
    write_timeout_s: float = 5.0
    """A router that reads nothing for this long loses its stream, and its requests are cancelled."""
    max_pending_bytes: int = 64 * 1024 * 1024
    """Most that may wait for one router, in bytes; more ends its stream."""
    announce_period_s: float = 1.0
    """Between announcements, unless the router asks for another pace."""
    inline_text_bytes: int = 4096
    """Longer texts are tokenised on a thread of their own."""
    text_timeout_s: float = 5.0
    """A text that takes longer to tokenise is refused."""
    enable_fault_injection: bool = False
    """Offer FaultService, which breaks this replica on request; on loopback only. For tests."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Of routers' and of direct clients' connections."""

    def __post_init__(self) -> None:
        check_listen("listen", self.listen, insecure=self.insecure or self.security.is_protected)
        if self.metrics_listen:
            check_listen("metrics_listen", self.metrics_listen, insecure=self.insecure or self.security.is_protected)
        for router in self.routers:
            check_router("routers", router)
        if self.name:
            check_name("name", self.name)
        if self.advertise and not is_host(self.advertise):
            raise ValueError(f"advertise: {self.advertise!r} is not a host")
        _at_least_one(self, "max_streams", "max_pending_bytes")
        _at_most(self, "max_streams", MAX_STREAMS)
        _positive(self, "load_period_s", "write_timeout_s", "announce_period_s", "text_timeout_s")
        _not_negative(self, "flush_interval_ms", "flush_cost_ms", "inline_text_bytes")
        if not self.flush_interval_ms <= self.max_flush_interval_ms < math.inf:
            raise ValueError(f"max_flush_interval_ms {self.max_flush_interval_ms} is under {self.flush_interval_ms}")
        host = split_address("listen", self.listen)[0]
        if host in ("0.0.0.0", "::") and not self.advertise:
            raise ValueError(f"advertise must name a host when listen is {self.listen!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How a client behaves; the same for all its calls."""

    timeout_s: float | None = None
    """Deadline of a call that sets none; None = wait for as long as it takes."""
    max_attempts: int = 4
    """Tries of one call, 1 to 5: UNAVAILABLE and RESOURCE_EXHAUSTED are tried again before the first message."""
    backoff_min_s: float = 0.1
    """Pause before the second try, unless the server names one; doubles with each further try."""
    backoff_max_s: float = 2.0
    """Longest pause."""
    criticality: str = "critical"
    """What is given up first when there is too much work: sheddable, then sheddable-plus, critical, critical-plus."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Of the connection to the server."""
    security: ClientSecurity = field(default_factory=ClientSecurity)
    """Certificates and the token."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            _positive(self, "timeout_s")
            _at_most(self, "timeout_s", MAX_TIMEOUT_S)
        if self.criticality not in CRITICALITIES:
            raise ValueError(f"criticality {self.criticality!r:.60} is not one of {', '.join(CRITICALITIES)}")
        if not 1 <= self.max_attempts <= 5:
            raise ValueError(f"max_attempts {self.max_attempts} is outside [1, 5]")
        _positive(self, "backoff_min_s", "backoff_max_s")


def from_mapping(config: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from plain values, such as a file's: unknown keys are refused, lists become tuples.

    Raises ValueError naming what is no field of it, or has another type than its field.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{config.__name__} is {values!r:.60}, must be a mapping")
    names = {entry.name for entry in dataclasses.fields(config)}  # type: ignore[arg-type]
    unknown = sorted(map(str, values.keys() - names))
    if unknown:
        raise ValueError(f"{config.__name__} has no {', '.join(map(repr, unknown))}; it has {', '.join(sorted(names))}")
    plain = {name: _plain(config, name, value) for name, value in values.items()}
    check_types(config, plain)
    return config(**plain)


def check_listen(name: str, address: str, *, insecure: bool) -> None:
    """Refuse to serve others without protection unless that is asked for."""
    host, _ = split_address(name, address)
    if not is_loopback(host) and not insecure:
        raise ValueError(
            f"{name} {address!r} can be reached by others: that needs TLS and tokens (or client certificates); without them, insecure=True, --insecure on the command line"
        )


def check_address(name: str, address: str) -> None:
    """Refuse what cannot be dialed."""
    if split_address(name, address)[1] == 0:
        raise ValueError(f"{name}: {address!r} has no port to dial")


def check_router(name: str, router: str) -> None:
    """Refuse what names no routers; see ReplicaConfig.routers."""
    if not router.startswith(FILE):
        check_address(name, router.removeprefix(DNS))
    elif router == FILE:
        raise ValueError(f"{name}: {router!r} names no file")


def is_listed(router: str) -> bool:
    """Whether it stands for a list of routers that may change, not for an address."""
    return router.startswith((DNS, FILE))


def check_name(name: str, value: str) -> None:
    """Refuse a name that a router would not take: names travel in logs, metrics and tables."""
    if not _NAME.fullmatch(value):
        raise ValueError(f"{name} {value!r:.60} must be 1 to 128 printable ASCII characters without spaces")


def split_address(name: str, address: str) -> tuple[str, int]:
    """The host (without brackets) and port of `host:port`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{name}: {address!r} is not host:port")
    return host, int(port)


def is_host(text: str) -> bool:
    """Whether this can name a machine, without a port; an IPv6 address has no brackets."""
    return _HOST.fullmatch(text) is not None


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(config: type[Any], name: str, value: Any) -> Any:
    nested: dict[str, type[Any]] = {"keepalive": Keepalive, "security": SecurityConfig}
    if name in nested and isinstance(value, Mapping):
        return from_mapping(nested[name], value)
    return field_value(config, name, value)


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value} is not a positive number")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {value} is negative or not a number")


def _at_most(config: object, name: str, limit: float) -> None:
    value = getattr(config, name)
    if value > limit:
        raise ValueError(f"{name} {value} is over {limit}")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{name} {value} is under 1")
