"""Options that several commands share, each written once."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.running import usage_errors
from cluster.config import MAX_TIMEOUT_S

MODEL, SHAPES, ENGINE, NETWORK, SAMPLING = "Model", "Shapes", "Engine", "Network", "Sampling"
DEFAULT_PORT = 50050
LOG_LEVEL_VARIABLE = "GRAPHPOOL_LOG_LEVEL"
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"


class Device(StrEnum):
    """Where a worker computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class Graphs(StrEnum):
    """How steps are launched."""

    AUTO = "auto"
    OFF = "off"
    FAKE = "fake"


class LogLevel(StrEnum):
    """From which weight on a line is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """What `logging` calls it."""
        return logging.getLevelNamesMapping()[self.name]


def integers(text: str) -> list[int]:
    """Parse "256,1024" into numbers, at least one."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 256,1024") from None


def path(text: str) -> Path:
    """A file or folder; no text at all, such as that of an unset variable, would be the current one."""
    if not text:
        raise typer.BadParameter("is empty, must name a file or folder")
    return Path(text)


def dialable(address: str) -> str:
    """The same host:port, refused here when it is none: gRPC would only say that a name cannot be looked up."""
    from cluster.config import check_address

    with usage_errors():
        check_address("address", address)
    return address


def all_dialable(addresses: str) -> str:
    """The same comma-separated list, refused here when one of them is no host:port."""
    from cluster.client.endpoints import check_addresses

    with usage_errors():
        check_addresses("address", addresses)
    return addresses


def metrics_listen(host: str, port: int | None) -> str:
    """host:port of the metrics; "" without a port."""
    from cluster.config import join_address

    return "" if port is None else join_address(host, port)


Model = Annotated[
    str,
    typer.Option(
        help="The embedded smollm2-135m, a local directory, a .gguf file, or a hub id.",
        rich_help_panel=MODEL,
        show_default=True,
    ),
]
ServedModelName = Annotated[
    str,
    typer.Option(help="Name by which clients ask for it. Default: as --model.", rich_help_panel=MODEL),
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(help="dummy: random weights from a config alone; prompts are then token ids.", rich_help_panel=MODEL),
]
DeviceOption = Annotated[Device, typer.Option(help="auto takes CUDA where there is a GPU.", rich_help_panel=MODEL)]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: bfloat16 on CUDA, float32 on the CPU.", rich_help_panel=MODEL)]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="DIR",
        help="Where converted models are kept. Default: ~/.cache/graphpool.",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1, help="Longest sequence in tokens, prompt and answer. Default: the model's.", rich_help_panel=SHAPES
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,N,N",
        help="Four sequence lengths; the last is --max-model-len. Default: 256,1024,4096 and the limit.",
        rich_help_panel=SHAPES,
    ),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences decoded together. Default: 256 on CUDA, 16 on the CPU.", rich_help_panel=SHAPES
    ),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        metavar="N,...", help="Batch sizes that steps are padded to. Default: powers of two.", rich_help_panel=SHAPES
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        min=1, help="Prompt tokens computed in one step. Default: 1024 on CUDA, 512 on the CPU.", rich_help_panel=SHAPES
    ),
]
KvCacheMib = Annotated[
    int | None,
    typer.Option(
        min=1, help="Size of the KV pool in MiB. Default: from --gpu-memory-fraction.", rich_help_panel=ENGINE
    ),
]
GpuMemoryFraction = Annotated[
    float, typer.Option(min=0.05, max=1.0, help="Part of the GPU's memory a worker may take.", rich_help_panel=ENGINE)
]
MaxWaiting = Annotated[
    int, typer.Option(min=1, help="Sequences that may queue in one worker; more are refused.", rich_help_panel=ENGINE)
]
GraphsOption = Annotated[
    Graphs,
    typer.Option(
        help="auto: CUDA graphs on CUDA. off: eager. fake: the graph path without a GPU.", rich_help_panel=ENGINE
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other field of worker.config.WorkerConfig, such as capture=startup, kernels=torch, prefix_cache=false, "
        "model_impl=transformers or max_graph_bytes=4294967296; may be given several times.",
        rich_help_panel=ENGINE,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Bit-equal logits for equal sequences, whatever runs beside them. Slower; native models only.",
        rich_help_panel=ENGINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads of one worker. Default: the cores, shared fairly.", rich_help_panel=ENGINE),
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT",
        callback=dialable,
        help="The router, or one replica.",
        rich_help_panel=NETWORK,
    ),
]
Addresses = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT,...",
        callback=all_dialable,
        help="The router, or one replica. Of several, separated by commas, the next one takes over when one is lost.",
        rich_help_panel=NETWORK,
    ),
]
AskedModel = Annotated[
    str, typer.Option("--model", help="Which model, where the router serves several.", rich_help_panel=NETWORK)
]
Host = Annotated[str, typer.Option(help="Address to bind.", rich_help_panel=NETWORK)]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Serve others than this machine without TLS and tokens.", rich_help_panel=NETWORK),
]
FlushMs = Annotated[
    float,
    typer.Option(
        min=0.0, help="Least milliseconds between two messages of an answer; 0 = every step.", rich_help_panel=NETWORK
    ),
]
DrainS = Annotated[
    float, typer.Option(min=0.0, help="Seconds that running answers may go on at the end.", rich_help_panel=NETWORK)
]
RouterPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Where clients connect; 0 takes any free port.", rich_help_panel=NETWORK)
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Where Prometheus finds metrics, on --host; 0 takes any free port. Default: none.",
        rich_help_panel=NETWORK,
    ),
]
MaxStreams = Annotated[
    int, typer.Option(min=1, help="Requests answered at the same time; more are refused.", rich_help_panel=NETWORK)
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        envvar=LOG_LEVEL_VARIABLE,
        help="What is logged on stderr of our own doing; other libraries' lines from warning on.",
        rich_help_panel=NETWORK,
    ),
]
TimeoutS = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=MAX_TIMEOUT_S, help="Deadline of the whole answer, in seconds.", rich_help_panel=NETWORK
    ),
]
