"""`graphpool top`: a live screen of a pool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import security_options as security
from cluster.cli.options import DEFAULT_ADDRESS, Address
from cluster.cli.running import one_sentence_errors, sentence

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cluster.cli.top_screen import TopScreen
    from cluster.client import GraphpoolClient

CALL_TIMEOUT_S = 5.0


def top(
    address: Address = DEFAULT_ADDRESS,
    token_file: security.TokenFile = None,
    tls_ca: security.TlsCa = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    insecure: security.ClearToken = False,
    period: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two readings.")] = 1.0,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after so many readings; default: on Ctrl-C.")
    ] = None,
) -> None:
    """Watch a pool: replicas and their tiers, queue, tokens/s over the last minute, share of steps from graphs.

    A router that goes away under way is waited for; exit code 1 when nothing answers at the beginning. Without a terminal
    each reading is printed below the last one.
    """
    with one_sentence_errors():
        from cluster.cli.top_screen import TopScreen
        from cluster.client import GraphpoolClient

        config = security.client_config(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure
        )
        with GraphpoolClient(address, config) as client:
            _watch(client, TopScreen(address), period, rounds)


def _watch(client: GraphpoolClient, screen: TopScreen, period_s: float, rounds: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    shown, done = screen.show(client.status(timeout_s=CALL_TIMEOUT_S)), 1
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            if done == rounds:
                break
            time.sleep(period_s)
            shown, done = _read(client, screen), done + 1


def _read(client: GraphpoolClient, screen: TopScreen) -> RenderableType:
    from cluster.client import CallError

    try:
        return screen.show(client.status(timeout_s=CALL_TIMEOUT_S))
    except CallError as error:
        return screen.show_error(sentence(error))
