"""The pool's loads as a table for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.client import PoolStatus
from cluster.load_values import breaker_name, readiness_name, state_name
from protos import control_pb2

NOTABLE_SLOWNESS = 1.5
READY = control_pb2.REPLICA_STATE_READY
STATE_COLOURS = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "STOPPED": "dim", "FAILED": "red"}


def pool_table(pool: PoolStatus) -> Group:
    """Who answered, then one line for each replica it knows."""
    server = pool.server
    models = models_of(pool.replicas) or [server.model] * bool(server.model)
    what = f"{server.role} {server.id}, up {duration(server.uptime_s)}" + (
        f", serves {', '.join(models)}" if models else ""
    )
    return Group(Text(what), load_table(pool.replicas) if pool.replicas else Text("no replica is known", "yellow"))


def models_of(replicas: Sequence[control_pb2.ReplicaLoad]) -> list[str]:
    """What the replicas serve, each model once."""
    return sorted({replica.model for replica in replicas if replica.model})


def load_table(replicas: Sequence[control_pb2.ReplicaLoad]) -> Table:
    """One line a replica, with its model where there are several.

    A tier's column shows "running+free": sequences in it, and how many more could start.
    """
    has_models = len(models_of(replicas)) > 1
    tiers = sorted({tier.tier for replica in replicas for tier in replica.load.tiers})
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("replica", no_wrap=True)
    if has_models:
        table.add_column("model", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in (*(f"≤{tier}" for tier in tiers), "run", "wait", "tok/s", "step ms", "blocks", "graphs"):
        table.add_column(title, justify="right", no_wrap=True)
    for replica in sorted(replicas, key=lambda replica: replica.replica):
        model = [replica.model or "-"] if has_models else []
        table.add_row(replica.replica, *model, _state_cell(replica), *_load_cells(replica, tiers))
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


def duration(seconds: float) -> str:
    """`3 min 5 s`."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"
