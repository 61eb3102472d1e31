"""A pool's loads as plain values, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict

from cluster.pool_totals import PoolTotals
from protos import control_pb2

WIDE_COUNTS = (
    *("outstanding_tokens", "steps", "graph_replays", "eager_steps"),
    *("prefix_cache_queries", "prefix_cache_hits", "waiting_prefill_tokens"),
)


def state_name(state: control_pb2.ReplicaState.ValueType) -> str:
    """`READY` for REPLICA_STATE_READY."""
    return control_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_")


def readiness_name(readiness: control_pb2.GraphReadiness.ValueType) -> str:
    """`full` for GRAPH_READINESS_FULL."""
    return control_pb2.GraphReadiness.Name(readiness).removeprefix("GRAPH_READINESS_").lower()


def breaker_name(breaker: control_pb2.Breaker.ValueType) -> str:
    """`half_open` for BREAKER_HALF_OPEN."""
    return control_pb2.Breaker.Name(breaker).removeprefix("BREAKER_").lower()


def load_values(replica: control_pb2.ReplicaLoad) -> dict[str, Any]:
    """Plain values with the wire contract's field names; states as words."""
    values = MessageToDict(replica, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    values["state"] = state_name(replica.state)
    values["breaker"] = breaker_name(replica.breaker)
    load: dict[str, Any] = values.get("load") or {}
    if load:
        load["readiness"] = readiness_name(replica.load.readiness)
        for name in WIDE_COUNTS:
            load[name] = int(load[name])  # JSON's mapping of protobuf writes 64-bit integers as strings
    values["router_outstanding_tokens"] = int(values["router_outstanding_tokens"])
    return values


def pool_values(server: control_pb2.ServerInfo, replicas: Sequence[control_pb2.ReplicaLoad]) -> dict[str, Any]:
    """Plain values of the server, of the pool as a whole, and of its replicas."""
    who = MessageToDict(server, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "server": who,
        "totals": asdict(PoolTotals.of(replicas)),
        "replicas": [load_values(one) for one in replicas],
    }
