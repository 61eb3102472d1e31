"""`graphpool router`: a router alone, for replicas that run elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import admission_options as admission
from cluster.cli import options
from cluster.cli import security_options as security
from cluster.cli.admission_options import PolicyName
from cluster.cli.config_file import ConfigFile
from cluster.cli.options import NETWORK, LogLevel
from cluster.cli.running import run_until_stopped, usage_errors

if TYPE_CHECKING:
    from cluster.config import RouterConfig
    from cluster.security.config import SecurityConfig


def router(
    replica: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A replica that does not announce itself; may be given several times."),
    ] = None,
    host: options.Host = "127.0.0.1",
    port: options.RouterPort = options.DEFAULT_PORT,
    name: Annotated[
        str, typer.Option(help="Shown in status and logs. Default: made at start.", rich_help_panel=NETWORK)
    ] = "",
    metrics_port: options.MetricsPort = None,
    max_streams: options.MaxStreams = 4096,
    policy: admission.Policy = PolicyName.LEAST_TOKENS,
    max_waiting: admission.MaxWaiting = 1024,
    max_wait_s: admission.MaxWaitS = 120.0,
    wait_for_replica_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long a request may wait while no replica of its model takes any; a pool that scales to zero needs "
            "more than a replica takes to start.",
            rich_help_panel=NETWORK,
        ),
    ] = 2.0,
    drain_s: options.DrainS = 30.0,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    tls_ca: security.TlsCa = None,
    client_certs: security.ClientCerts = True,
    tokens: security.Tokens = None,
    pool_token: security.PoolToken = None,
    split_quotas: Annotated[
        bool,
        typer.Option(
            "--split-quotas/--whole-quotas",
            help="Divide tenants' quotas by the number of routers, or let each router give out all of them.",
            rich_help_panel=security.SECURITY,
        ),
    ] = True,
    insecure: options.Insecure = False,
    log_level: options.LogLevelOption = LogLevel.INFO,
    _config: ConfigFile = None,
) -> None:
    """Run a router alone: it spreads requests over the replicas given here and those that announce themselves to it.

    Any number of routers may serve the same replicas. Stops on Ctrl-C or SIGTERM after finishing what it has.
    """
    with usage_errors():
        from cluster.config import RouterConfig, join_address

        config = RouterConfig(
            listen=join_address(host, port),
            insecure=insecure,
            security=security.server_security(
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_ca=tls_ca,
                client_certs=client_certs,
                tokens=tokens,
                pool_token=pool_token,
            ),
            metrics_listen=options.metrics_listen(host, metrics_port),
            name=name,
            replicas=tuple(replica or ()),
            max_streams=max_streams,
            wait_for_replica_s=wait_for_replica_s,
            policy=policy.value,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            split_quotas=split_quotas,
        )
    run_until_stopped(lambda: _serve(config, drain_s), log_level=log_level.number)


def joining(address: str, asked: SecurityConfig) -> str:
    """What a replica is started with to join the router at `address`."""
    from cluster.config import is_loopback, join_address, split_address

    host, port = split_address("listen", address)
    if is_loopback(host) and not (asked.asks_who or asked.has_tls):
        return f"graphpool worker --port 0 --announce {address}"
    place = join_address("THIS-HOST" if host in ("0.0.0.0", "::") else host, port)
    secured = " and --tls-cert, --tls-key, --tls-ca of the same CA" if asked.has_tls else ""
    return f"graphpool worker with --announce {place}, a --host that the router reaches{secured}"


async def _serve(config: RouterConfig, drain_s: float) -> None:
    from cluster.cli.startup import StartupLines
    from cluster.heap import settle_heap
    from cluster.router.server import RouterServer

    server = RouterServer(config)
    with StartupLines() as lines:
        await server.start()
        settle_heap()
        lines.done(f"router at [bold]{server.address}[/]")
        if server.metrics_address:
            lines.say(f"  metrics:  {config.security.http}://{server.metrics_address}/metrics")
        if not config.replicas:
            lines.say(f"  add a replica:  {joining(server.address, config.security)}")
        try:
            await asyncio.Event().wait()
        finally:
            lines.doing("finishing what is running (Ctrl-C again ends it at once)")
            await server.drain(drain_s)
            await server.stop()
            lines.done("stopped")
