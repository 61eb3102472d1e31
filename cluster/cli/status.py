"""`graphpool status`: who is in the pool and how busy it is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import security_options as security
from cluster.cli.options import DEFAULT_ADDRESS, Address
from cluster.cli.running import fail, one_sentence_errors

if TYPE_CHECKING:
    from cluster.client import GraphpoolClient, PoolStatus

CALL_TIMEOUT_S = 5.0


def status(
    address: Address = DEFAULT_ADDRESS,
    token_file: security.TokenFile = None,
    tls_ca: security.TlsCa = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    insecure: security.ClearToken = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    watch: Annotated[float | None, typer.Option(min=0.1, metavar="SECONDS", help="Show it again and again.")] = None,
) -> None:
    """Show the replicas of a pool: state, tiers, running and waiting sequences, tokens/s, step time.

    Exit code 1 when nothing answers or no replica is READY.
    """
    with one_sentence_errors():
        from cluster.client import GraphpoolClient

        config = security.client_config(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure
        )
        with GraphpoolClient(address, config) as client:
            if watch is None:
                _show_once(client, as_json)
            elif as_json:
                _print_forever(client, watch)
            else:
                _watch(client, watch)


def _show_once(client: GraphpoolClient, as_json: bool) -> None:
    from rich.console import Console

    from cluster.cli.load_table import READY, pool_table

    pool = client.status(timeout_s=CALL_TIMEOUT_S)
    if as_json:
        _print_json(pool)
    else:
        Console(highlight=False).print(pool_table(pool))
    if not any(replica.state == READY for replica in pool.replicas):
        fail("no replica is ready")


def _print_forever(client: GraphpoolClient, period_s: float) -> None:
    while True:
        _print_json(client.status(timeout_s=CALL_TIMEOUT_S))
        time.sleep(period_s)


def _watch(client: GraphpoolClient, period_s: float) -> None:
    from rich.live import Live

    from cluster.cli.load_table import pool_table

    with Live(pool_table(client.status(timeout_s=CALL_TIMEOUT_S)), auto_refresh=False) as live:
        while True:
            time.sleep(period_s)
            live.update(pool_table(client.status(timeout_s=CALL_TIMEOUT_S)), refresh=True)


def _print_json(pool: PoolStatus) -> None:
    from cluster.load_values import pool_values

    typer.echo(json.dumps(pool_values(pool.server, pool.replicas)))
