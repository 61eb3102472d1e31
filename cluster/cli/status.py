"""`graphpool status`: who is in the pool and how busy it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import DEFAULT_ADDRESS, Address
from cluster.cli.running import fail, one_sentence_errors

if TYPE_CHECKING:
    from cluster.client import GraphpoolClient
    from protos import control_pb2


def status(
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    watch: Annotated[float | None, typer.Option(min=0.1, metavar="SECONDS", help="Show it again and again.")] = None,
) -> None:
    """Show the replicas of a pool: state, tiers, running and waiting sequences, tokens/s, step time.

    Exit code 1 when nothing answers or no replica is READY.
    """
    with one_sentence_errors():
        from cluster.client import GraphpoolClient

        with GraphpoolClient(address) as client:
            if watch is not None:
                _watch(client, watch, as_json)
                return
            loads = client.loads()
            _show(client, loads, as_json)
        if not any(_is_ready(replica) for replica in loads):
            fail("no replica is ready")
