"""The pool's loads as a table for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from protos import control_pb2

STATE_COLOURS = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "STOPPED": "dim", "FAILED": "red"}


def state_name(state: control_pb2.ReplicaState) -> str:
    """`READY` for REPLICA_STATE_READY."""
    return control_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_")


def readiness_name(readiness: control_pb2.GraphReadiness) -> str:
    """`full` for GRAPH_READINESS_FULL."""
    return control_pb2.GraphReadiness.Name(readiness).removeprefix("GRAPH_READINESS_").lower()


def load_table(replicas: Sequence[control_pb2.ReplicaLoad]) -> Table:
    """One line a replica. A tier is shown as "tokens: running+free": sequences in it, and how many more could start."""
    table = Table(title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("replica")
    table.add_column("state")
    table.add_column("tiers (running+free)", overflow="fold")
    for title in ("running", "waiting", "tokens/s", "step ms", "blocks", "graphs"):
        table.add_column(title, justify="right")
    for replica in replicas:
        table.add_row(*_cells(replica))
    return table


def _cells(replica: control_pb2.ReplicaLoad) -> list[Text | str]:
    state, load = state_name(replica.state), replica.load
    name = Text.assemble(replica.replica or "?", (f"  {replica.address}", "dim"))
    if not replica.HasField("load"):
        return [name, Text(state, STATE_COLOURS.get(state, "")), *["-"] * 7]
    return [
        name,
        Text(state, STATE_COLOURS.get(state, "")),
        "  ".join(f"{tier.tier}: {tier.running}+{tier.free_slots}" for tier in load.tiers),
        str(load.running),
        str(load.waiting),
        f"{load.tokens_per_s:.1f}",
        f"{load.step_ms:.2f}",
        f"{load.total_blocks - load.free_blocks}/{load.total_blocks}",
        readiness_name(load.readiness),
    ]


def load_values(replica: control_pb2.ReplicaLoad) -> dict[str, Any]:
    """Plain values with the wire contract's field names; states as words."""
    from google.protobuf.json_format import MessageToDict

    values = MessageToDict(replica, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    values["state"] = state_name(replica.state)
    load: dict[str, Any] = values.get("load") or {}
    if load:
        load["readiness"] = readiness_name(replica.load.readiness)
        for name in ("outstanding_tokens", "steps", "graph_replays", "eager_steps"):
            load[name] = int(load[name])  # JSON's mapping of protobuf writes 64-bit integers as strings
    values["router_outstanding_tokens"] = int(values["router_outstanding_tokens"])
    return values
