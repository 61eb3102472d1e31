"""`graphpool drain`: take one replica out of a pool without losing an answer."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import security_options as security
from cluster.cli.options import DEFAULT_ADDRESS, Address
from cluster.cli.running import one_sentence_errors

SLACK_S = 10.0
"""For the call itself, beyond the grace."""


def drain(
    replica: Annotated[str, typer.Argument(help="Its name, as `graphpool status` shows it.")],
    grace_s: Annotated[
        float,
        typer.Option(min=0.0, max=86400.0, metavar="SECONDS", help="What still runs then goes on elsewhere."),
    ] = 30.0,
    address: Address = DEFAULT_ADDRESS,
    token_file: security.TokenFile = None,
    tls_ca: security.TlsCa = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    insecure: security.ClearToken = False,
) -> None:
    """Let a replica finish its answers and take no new ones; ends when it has left.

    Under Ray Serve a new replica takes its place. Where callers say who they are this takes an operator's token.
    """
    if not replica:  # which would be the router itself, and is more likely an unset variable
        raise typer.BadParameter("the replica has no name")
    with one_sentence_errors():
        from cluster.client import GraphpoolClient

        config = security.client_config(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure
        )
        with GraphpoolClient(address, config) as client:
            client.drain(replica, grace_s=grace_s, timeout_s=grace_s + SLACK_S)
        typer.echo(f"{replica} has drained")
