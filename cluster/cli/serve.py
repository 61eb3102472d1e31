"""`graphpool serve`: a whole pool on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import admission_options as admission
from cluster.cli import options
from cluster.cli import security_options as security
from cluster.cli.admission_options import PolicyName
from cluster.cli.config_file import ConfigFile
from cluster.cli.options import Device, Dtype, Graphs, LoadFormat, LogLevel
from cluster.cli.running import run_until_stopped, usage_errors
from cluster.cli.worker_options import worker_config

if TYPE_CHECKING:
    from cluster.cli.startup import StartupLines
    from cluster.local_pool import LocalPool, LocalPoolConfig
    from cluster.security.config import SecurityConfig
    from protos.control_pb2 import ModelInfo

WATCH_S = 0.5


def serve(
    model: options.Model = "smollm2-135m",
    replicas: Annotated[int, typer.Option(min=1, help="Workers to keep alive; on CUDA, one GPU each.")] = 1,
    served_model_name: options.ServedModelName = "",
    load_format: options.LoadFormatOption = LoadFormat.AUTO,
    device: options.DeviceOption = Device.AUTO,
    dtype: options.DtypeOption = Dtype.AUTO,
    cache_dir: options.CacheDir = None,
    max_model_len: options.MaxModelLen = None,
    tiers: options.Tiers = None,
    max_batch: options.MaxBatch = None,
    buckets: options.Buckets = None,
    prefill_chunk: options.PrefillChunk = None,
    kv_cache_mib: options.KvCacheMib = None,
    gpu_memory_fraction: options.GpuMemoryFraction = 0.85,
    max_waiting: options.MaxWaiting = 1024,
    graphs: options.GraphsOption = Graphs.AUTO,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    settings: options.Set = None,
    host: options.Host = "127.0.0.1",
    port: options.RouterPort = options.DEFAULT_PORT,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Where Prometheus finds metrics: the router's here, replicas' on the ports after it. Default: none.",
            rich_help_panel=options.NETWORK,
        ),
    ] = None,
    max_streams: options.MaxStreams = 4096,
    policy: admission.Policy = PolicyName.LEAST_TOKENS,
    max_wait_s: admission.MaxWaitS = 120.0,
    flush_ms: options.FlushMs = 8.0,
    drain_s: options.DrainS = 10.0,
    start_timeout_s: Annotated[
        float,
        typer.Option(min=1.0, help="Give up when the pool is not ready by then.", rich_help_panel=options.NETWORK),
    ] = 900.0,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    tls_ca: security.TlsCa = None,
    client_certs: security.ClientCerts = True,
    tokens: security.Tokens = None,
    pool_token: security.PoolToken = None,
    insecure: options.Insecure = False,
    log_level: options.LogLevelOption = LogLevel.WARNING,
    _config: ConfigFile = None,
) -> None:
    """Serve a model from this machine: a private Ray keeps the replicas alive, a router in this process takes requests.

    Stops on Ctrl-C or SIGTERM after finishing what it has, and leaves no process behind.
    """
    engine = worker_config(
        model=model,
        served_model_name=served_model_name,
        load_format=load_format,
        device=device,
        dtype=dtype,
        cache_dir=cache_dir,
        max_model_len=max_model_len,
        tiers=tiers,
        max_batch=max_batch,
        buckets=buckets,
        prefill_chunk=prefill_chunk,
        kv_cache_mib=kv_cache_mib,
        gpu_memory_fraction=gpu_memory_fraction,
        max_waiting=max_waiting,
        graphs=graphs,
        deterministic=deterministic,
        threads=threads,
        settings=settings or (),
    )
    with usage_errors():
        from cluster.config import RouterConfig, join_address
        from cluster.local_pool import LocalPoolConfig

        config = LocalPoolConfig(
            worker=engine,
            router=RouterConfig(
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
                max_streams=max_streams,
                policy=policy.value,
                max_waiting=max_waiting,
                max_wait_s=max_wait_s,
                metrics_listen=options.metrics_listen(host, metrics_port),
            ),
            num_replicas=replicas,
            flush_interval_ms=flush_ms,
            start_timeout_s=start_timeout_s,
            drain_timeout_s=drain_s,
        )
    run_until_stopped(lambda: _serve(config), log_level=log_level.number)


async def _serve(config: LocalPoolConfig) -> None:
    from rich.markup import escape

    from cluster.cli.startup import StartupLines
    from cluster.heap import settle_heap
    from cluster.local_pool import LocalPool

    with StartupLines() as lines:
        lines.say(f"graphpool serves {escape(config.worker.model)} from {_replicas(config.num_replicas)}")
        try:
            async with LocalPool(config, lines) as pool:
                settle_heap()
                _say_ready(lines, pool, await _model_info(pool), config.router.security)
                await _tell_changes(pool, lines)
        except asyncio.CancelledError:
            lines.done("stopped")
            raise


def _replicas(count: int) -> str:
    return "one replica" if count == 1 else f"{count} replicas"


async def _model_info(pool: LocalPool) -> ModelInfo:
    """What is served; should a replica be lost just now, what most models are."""
    from cluster.errors import ClusterError
    from protos.control_pb2 import ModelInfo

    try:
        return await pool.model_info()
    except ClusterError:
        return ModelInfo(has_tokenizer=True, has_chat_template=True)


def _say_ready(lines: StartupLines, pool: LocalPool, info: ModelInfo, asked: SecurityConfig) -> None:
    from cluster.cli.first_words import QUESTION, SECURED, suggestion

    address = pool.address
    lines.done(f"[bold]ready[/] at [bold]{address}[/]; Ctrl-C stops everything")
    if pool.metrics_address:
        lines.say(f"  metrics:  {asked.http}://{pool.metrics_address}/metrics, replicas' on the ports after it")
    if asked.asks_who or asked.has_tls:
        lines.say(SECURED)
        return
    for line in suggestion(address, has_tokenizer=info.has_tokenizer, has_chat_template=info.has_chat_template):
        lines.say(line)
    if info.has_chat_template:
        lines.say(
            f'  grpcurl -plaintext -d \'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}]}}\' '
            f"{address} graphpool.v1.GenerationService/ChatStream"
        )


async def _tell_changes(pool: LocalPool, lines: StartupLines) -> None:
    """Say when a replica leaves or joins, until cancelled. Raises PoolLost when the pool cannot go on."""
    from cluster.cli.pool_changes import PoolChanges

    changes, lost = PoolChanges(pool.loads()), ""
    while True:
        await asyncio.sleep(WATCH_S)
        was_lost, lost = lost, pool.lost_daemon()
        if lost and not was_lost:
            lines.done(
                f"[red]Ray's {lost} has ended[/]: nobody replaces replicas any more, so start the pool again soon"
            )
        for line in changes.lines(pool.loads(), is_replaced=not lost):
            lines.done(line)
