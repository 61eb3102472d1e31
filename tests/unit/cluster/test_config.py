from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.autoscale.config import ScalingConfig
from cluster.config import (
    ClientConfig,
    Keepalive,
    ReplicaConfig,
    RouterConfig,
    from_mapping,
    is_loopback,
    join_address,
    split_address,
)
from cluster.transport import client_options
from worker.config import WorkerConfig


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.2:1", "localhost:50050", "[::1]:50050"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert RouterConfig(listen=listen).listen == listen
    assert ReplicaConfig(listen=listen).listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:50050", "[::]:1", "10.1.2.3:1", "example.com:1", "localhost.evil.com:1"])
def test_an_address_that_others_reach_is_refused_unless_said_out_loud(listen: str) -> None:
    with pytest.raises(ValueError, match="insecure=True"):
        RouterConfig(listen=listen)
    with pytest.raises(ValueError, match="insecure=True"):
        ReplicaConfig(listen=listen, advertise="10.0.0.1")
    assert RouterConfig(listen=listen, insecure=True).insecure


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:x",
        "host:65536",
        "host:-1",
        "http://h:1",
        "u@h:1",
        "a b:1",
        "a:b:1",
        "1.2.3.4:5:6",
    ],
)
def test_what_is_not_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        RouterConfig(listen=address)
    with pytest.raises(ValueError, match="replicas"):
        RouterConfig(replicas=(address,))
    with pytest.raises(ValueError, match="routers"):
        ReplicaConfig(routers=(address,))


def test_an_address_to_dial_needs_a_port() -> None:
    with pytest.raises(ValueError, match="no port"):
        RouterConfig(replicas=("127.0.0.1:0",))


def test_a_replica_that_listens_everywhere_must_say_where_it_is_dialed() -> None:
    with pytest.raises(ValueError, match="advertise"):
        ReplicaConfig(listen="0.0.0.0:1", insecure=True)
    assert ReplicaConfig(listen="0.0.0.0:1", insecure=True, advertise="10.0.0.1").advertise == "10.0.0.1"


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (RouterConfig, "max_streams", 0),
        (RouterConfig, "max_streams", 10**10),
        (RouterConfig, "max_queued_messages", -1),
        (RouterConfig, "resume_budget", -1),
        (RouterConfig, "max_queued_bytes", 0),
        (RouterConfig, "max_waiting", 0),
        (RouterConfig, "max_wait_s", 0),
        (RouterConfig, "reader_timeout_s", float("inf")),
        (RouterConfig, "max_connection_age_s", 0),
        (RouterConfig, "connection_grace_s", -1),
        (RouterConfig, "breaker_pause_min_s", 0),
        (RouterConfig, "breaker_pause_max_s", float("nan")),
        (RouterConfig, "policy", "round-robin"),
        (RouterConfig, "affinity_bound", 0.9),
        (RouterConfig, "wait_for_replica_s", -0.1),
        (RouterConfig, "announce_period_s", 0),
        (RouterConfig, "silence_timeout_s", float("nan")),
        (RouterConfig, "connect_timeout_s", float("inf")),
        (RouterConfig, "reconnect_min_s", 0),
        (RouterConfig, "reconnect_max_s", -1),
        (RouterConfig, "canary_timeout_s", 0),
        (ReplicaConfig, "flush_interval_ms", -1),
        (ReplicaConfig, "max_flush_interval_ms", 1),
        (ReplicaConfig, "flush_cost_ms", float("nan")),
        (ReplicaConfig, "load_period_s", 0),
        (ReplicaConfig, "write_timeout_s", 0),
        (ReplicaConfig, "max_pending_bytes", 0),
        (ReplicaConfig, "max_streams", 0),
        (ReplicaConfig, "max_streams", 10**10),
        (ReplicaConfig, "announce_period_s", -2),
        (ReplicaConfig, "inline_text_bytes", -1),
        (ClientConfig, "timeout_s", 0),
        (ClientConfig, "max_attempts", 0),
        (ClientConfig, "max_attempts", 6),
        (ClientConfig, "backoff_min_s", 0),
        (ClientConfig, "backoff_max_s", -1),
        (Keepalive, "time_s", 1),
        (Keepalive, "timeout_s", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(config: type[Any], field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


@pytest.mark.parametrize("name", ["a b", "x" * 129, "\x1b[31m", "é", "line\n"])
@pytest.mark.parametrize("config", [RouterConfig, ReplicaConfig])
def test_a_name_that_no_router_would_take_is_refused_at_once(config: type[Any], name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        config(name=name)


@pytest.mark.parametrize("host", ["a b", "10.0.0.1:50051", "http://node", "node:1", "me@node"])
def test_an_advertised_host_that_cannot_be_dialed_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="advertise"):
        ReplicaConfig(advertise=host)


@pytest.mark.parametrize("host", ["node-7.local", "10.0.0.1", "fd00::7", "::1", "fe80::1%eth0"])
def test_names_and_addresses_of_both_kinds_can_be_advertised(host: str) -> None:
    assert ReplicaConfig(advertise=host).advertise == host


def test_times_too_long_for_grpc_are_as_long_as_it_can_count() -> None:
    keepalive = Keepalive(time_s=1e9, timeout_s=1e9)
    assert dict(client_options(ClientConfig(keepalive=keepalive)))["grpc.keepalive_time_ms"] == 2**31 - 1


def test_unknown_keys_are_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match=r"no 'lissten'; it has .*listen"):
        from_mapping(RouterConfig, {"lissten": "127.0.0.1:1"})


def test_a_config_can_come_from_plain_values() -> None:
    config = from_mapping(
        RouterConfig, {"replicas": ["127.0.0.1:1", "127.0.0.1:2"], "keepalive": {"time_s": 20.0}, "max_streams": 7}
    )
    assert config == RouterConfig(
        replicas=("127.0.0.1:1", "127.0.0.1:2"), keepalive=Keepalive(time_s=20.0), max_streams=7
    )


@pytest.mark.parametrize("config", [RouterConfig(), ReplicaConfig(), ClientConfig(), Keepalive()])
def test_configs_are_frozen(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, "other")


def test_addresses_split_and_join_with_the_brackets_of_ipv6() -> None:
    assert split_address("a", "[::1]:80") == ("::1", 80)
    assert join_address("::1", 80) == "[::1]:80"
    assert join_address(*split_address("a", "node-7.local:80")) == "node-7.local:80"
    assert is_loopback("::1")
    assert not is_loopback("node-7.local")


def test_a_client_that_may_try_once_has_no_retry_policy() -> None:
    def service_config(attempts: int) -> str:
        return str(dict(client_options(ClientConfig(max_attempts=attempts)))["grpc.service_config"])

    assert "retryPolicy" not in service_config(1)
    assert '"maxAttempts": 3' in service_config(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen", 50050),
        ("listen", None),
        ("replicas", "127.0.0.1:1"),
        ("replicas", [1]),
        ("max_streams", "64"),
        ("max_streams", 2.5),
        ("max_streams", True),
        ("max_wait_s", "soon"),
        ("max_wait_s", None),
        ("insecure", "no"),
        ("insecure", 0),
        ("keepalive", None),
        ("security", ["tokens"]),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*, must be ") as caught:
        from_mapping(RouterConfig, {name: value})
    assert (repr(tuple(value)) if isinstance(value, list) else repr(value)) in str(caught.value)


def test_a_type_is_named_as_a_file_writes_it() -> None:
    with pytest.raises(ValueError, match=r"routers is 'a:1', must be a list$"):
        from_mapping(ReplicaConfig, {"routers": "a:1"})
    with pytest.raises(ValueError, match=r"target_token_s is 'x', must be float or absent$"):
        from_mapping(ScalingConfig, {"target_token_s": "x"})


@pytest.mark.parametrize("values", [None, [], "worker", 5])
def test_what_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"ReplicaConfig is .*, must be a mapping"):
        from_mapping(ReplicaConfig, values)


def test_keys_of_any_type_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"has no '7', 'x'"):
        from_mapping(ReplicaConfig, {7: 1, "x": 2})  # type: ignore[dict-item]  # as YAML may hold them


def test_numbers_folders_and_what_may_be_absent_are_taken_as_files_write_them() -> None:
    assert from_mapping(ReplicaConfig, {"load_period_s": 1}).load_period_s == 1
    assert from_mapping(ScalingConfig, {"target_token_s": None}).target_token_s is None
    assert from_mapping(WorkerConfig, {"cache_dir": "/models", "tiers": [8, 16, 32, 64]}).cache_dir == Path("/models")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, 1e18])
def test_a_client_has_a_deadline_that_grpc_can_keep(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        ClientConfig(timeout_s=timeout_s)
