"""`graphpool worker`: one replica without Ray."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options
from cluster.cli import security_options as security
from cluster.cli.config_file import ConfigFile
from cluster.cli.options import NETWORK, Device, Dtype, Graphs, LoadFormat, LogLevel
from cluster.cli.running import run_until_stopped, usage_errors
from cluster.cli.worker_options import worker_config

if TYPE_CHECKING:
    from cluster.config import ReplicaConfig
    from worker.config import WorkerConfig

DEFAULT_PORT = 50051


def worker(
    model: options.Model = "smollm2-135m",
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
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes any free one and prints it.", rich_help_panel=NETWORK)
    ] = DEFAULT_PORT,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A router to announce to; may be given several times. dns:NAME:PORT: every address of the name, looked up again every 5 s. file:PATH: one a line, read again when it changes.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    advertise: Annotated[
        str, typer.Option(metavar="HOST", help="Host that routers dial. Default: --host.", rich_help_panel=NETWORK)
    ] = "",
    name: Annotated[str, typer.Option(help="Name of this place, kept over restarts.", rich_help_panel=NETWORK)] = "",
    metrics_port: options.MetricsPort = None,
    flush_ms: options.FlushMs = 8.0,
    drain_s: options.DrainS = 30.0,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    tls_ca: security.TlsCa = None,
    client_certs: security.ClientCerts = True,
    tokens: security.Tokens = None,
    pool_token: security.PoolToken = None,
    insecure: options.Insecure = False,
    log_level: options.LogLevelOption = LogLevel.WARNING,
    enable_fault_injection: Annotated[
        bool,
        typer.Option(
            "--enable-fault-injection",
            help="Let callers on this machine break this replica (FaultService). For tests.",
            rich_help_panel=NETWORK,
        ),
    ] = False,
    _config: ConfigFile = None,
) -> None:
    """Run one replica without Ray: it answers clients itself, and requests of the routers it announces itself to.

    Stops on Ctrl-C or SIGTERM after finishing what it has. Exit code 70: its engine failed; start it again.
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
        from cluster.config import ReplicaConfig, join_address

        config = ReplicaConfig(
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
            advertise=advertise,
            name=name,
            routers=tuple(announce or ()),
            flush_interval_ms=flush_ms,
            max_flush_interval_ms=max(64.0, flush_ms),
            enable_fault_injection=enable_fault_injection,
        )
    run_until_stopped(lambda: _serve(engine, config, drain_s), log_level=log_level.number)


async def _serve(engine: WorkerConfig, config: ReplicaConfig, drain_s: float) -> None:
    from rich.markup import escape

    from cluster.cli.first_words import SECURED, suggestion
    from cluster.cli.startup import StartupLines
    from cluster.replica_process import ReplicaProcess
    from cluster.transport import check_free

    check_free(config.listen)
    check_free(config.metrics_listen)
    with StartupLines() as lines:
        lines.doing(f"loading {engine.model}")
        process = await ReplicaProcess.open(engine, config, progress=lines.model_progress)
        info = process.engine.info
        lines.done(
            f"{escape(info.model)}: {info.architecture}, {info.dtype} on {info.device}, up to {info.max_model_len} tokens"
        )
        name = process.server.name
        called = "" if name == process.server.address else f" as {escape(name)}"
        lines.done(f"ready at [bold]{process.server.address}[/]{called}")
        if process.server.metrics_address:
            lines.say(f"  metrics:  {config.security.http}://{process.server.metrics_address}/metrics")
        tried = suggestion(
            process.server.address, has_tokenizer=info.has_tokenizer, has_chat_template=info.has_chat_template
        )
        for line in [SECURED] if config.security.asks_who or config.security.has_tls else tried:
            lines.say(line)
        try:
            await asyncio.Event().wait()
        finally:
            lines.doing("finishing what is running (Ctrl-C again ends it at once)")
            await process.close(grace_s=drain_s)
            lines.done("stopped")
