"""The pool's loads as a table for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.client import PoolStatus
from protos import control_pb2

NOTABLE_SLOWNESS = 1.5
WIDE_COUNTS = (
    *("outstanding_tokens", "steps", "graph_replays", "eager_steps"),
    *("prefix_cache_queries", "prefix_cache_hits", "waiting_prefill_tokens"),
)
READY = control_pb2.REPLICA_STATE_READY
STATE_COLOURS = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "STOPPED": "dim", "FAILED": "red"}


def state_name(state: control_pb2.ReplicaState.ValueType) -> str:
    """`READY` for REPLICA_STATE_READY."""
    return control_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_")


def readiness_name(readiness: control_pb2.GraphReadiness.ValueType) -> str:
    """`full` for GRAPH_READINESS_FULL."""
    return control_pb2.GraphReadiness.Name(readiness).removeprefix("GRAPH_READINESS_").lower()


def breaker_name(breaker: control_pb2.Breaker.ValueType) -> str:
    """`half_open` for BREAKER_HALF_OPEN."""
    return control_pb2.Breaker.Name(breaker).removeprefix("BREAKER_").lower()


def pool_table(pool: PoolStatus) -> Group:
    """Who answered, then one line for each replica it knows."""
    server = pool.server
    what = f"{server.role} {server.id}, up {_duration(server.uptime_s)}" + (
        f", serves {server.model}" if server.model else ""
    )
    return Group(Text(what), load_table(pool.replicas) if pool.replicas else Text("no replica is known", "yellow"))


def load_table(replicas: Sequence[control_pb2.ReplicaLoad]) -> Table:
    """One line a replica. A tier's column shows "running+free": sequences in it, and how many more could start."""
    tiers = sorted({tier.tier for replica in replicas for tier in replica.load.tiers})
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("replica", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in (*(f"≤{tier}" for tier in tiers), "run", "wait", "tok/s", "step ms", "blocks", "graphs"):
        table.add_column(title, justify="right", no_wrap=True)
    for replica in sorted(replicas, key=lambda replica: replica.replica):
        table.add_row(replica.replica, _state_cell(replica), *_load_cells(replica, tiers))
    return table


def _state_cell(replica: control_pb2.ReplicaLoad) -> Text:
    """The state, and what is out of the ordinary: a breaker that is not closed, steps slower than those of peers."""
    state = state_name(replica.state)
    cell = Text(state, STATE_COLOURS.get(state, ""))
    if replica.breaker in (control_pb2.BREAKER_OPEN, control_pb2.BREAKER_HALF_OPEN):
        cell.append(f" {breaker_name(replica.breaker)}", "red")
    if replica.slowness >= NOTABLE_SLOWNESS:
        cell.append(f" {replica.slowness:.1f}x", "yellow")
    return cell


def _load_cells(replica: control_pb2.ReplicaLoad, tiers: Sequence[int]) -> list[str]:
    load = replica.load
    if not load.total_blocks:
        return ["-"] * (len(tiers) + 6)
    in_tier = {tier.tier: f"{tier.running}+{tier.free_slots}" for tier in load.tiers}
    return [
        *(in_tier.get(tier, "-") for tier in tiers),
        str(load.running),
        str(load.waiting),
        f"{load.tokens_per_s:.1f}",
        f"{load.step_ms:.1f}",
        f"{load.total_blocks - load.free_blocks}/{load.total_blocks}",
        readiness_name(load.readiness),
    ]


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


def pool_values(pool: PoolStatus) -> dict[str, Any]:
    """Plain values of the server and its replicas."""
    server = MessageToDict(pool.server, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {"server": server, "replicas": [load_values(replica) for replica in pool.replicas]}


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"
