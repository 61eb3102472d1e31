"""Rules for the configs of `serve deploy`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.doctor.deploy.document import Document, Path
from cluster.doctor.deploy.schemas import serve_schema_findings
from cluster.doctor.finding import Finding

OUR_IMPORT = "cluster.serve_app:app"
STEP_MS = {"cuda": 10.0, "cpu": 50.0}
"""Longest step to reckon with, by device, where nobody has measured it."""


def serve_findings(document: Document, step_ms: float | None = None) -> Iterator[Finding]:
    """All of them. `step_ms`: how long a decode step takes, for the drain's length."""
    yield from serve_schema_findings(document)
    yield from _open_ports(document)
    names: dict[str, int] = {}
    for index, application in enumerate(document.items("applications")):
        if not isinstance(application, dict):
            continue
        path: Path = ("applications", index)
        yield from _route(document, path, application)
        if application.get("import_path") != OUR_IMPORT:
            continue
        yield from _arguments(document, (*path, "args"))
        yield from _gpu_share(document, (*path, "args"))
        yield from _scaling(document, (*path, "args"), len(document.items("applications")))
        yield from _limits(document, (*path, "args"))
        yield from _drain(document, (*path, "args"), step_ms)
        yield from _replica(document, (*path, "args"))
        yield from _replica_names(document, (*path, "args"), names)


def replica_gpus(document: Document) -> Iterator[tuple[Path, float, int]]:
    """Of each of our applications: where it says so, GPUs of one replica, and the most replicas there may be."""
    for index, application in enumerate(document.items("applications")):
        path: Path = ("applications", index, "args")
        if isinstance(application, dict) and application.get("import_path") == OUR_IMPORT:
            values = document.mapping(*path)
            gpus = values.get("num_gpus", 0 if document.get(*path, "worker", "device") == "cpu" else 1)
            scaling = values.get("scaling")
            count = scaling.get("max_replicas", 8) if isinstance(scaling, dict) else values.get("num_replicas", 1)
            if isinstance(gpus, (int, float)) and isinstance(count, int):
                yield (*path, "num_gpus"), float(gpus), count


def placement_findings(document: Document, nodes: Sequence[tuple[float, object]]) -> Iterator[Finding]:
    """Whether the replicas find a place on nodes with so many GPUs each, of which there may be so many."""
    largest = max((gpus for gpus, _ in nodes), default=0.0)
    total = sum(gpus * count if isinstance(count, int) else math.inf for gpus, count in nodes if gpus)
    wanted = 0.0
    for path, gpus, count in replica_gpus(document):
        wanted += gpus * count
        if gpus > largest:
            yield document.find(
                "fail", path, f"a replica asks for {gpus:g} GPUs, but no node has more than {largest:g}: it is never placed",
                f"num_gpus: {min(1.0, largest):g}, or nodes with more",
            )  # fmt: skip
        elif wanted > total:
            yield document.find(
                "fail", path, f"the replicas ask for {wanted:g} GPUs together, but the nodes have {total:g} at most: some are never placed",
                "fewer replicas, or a larger limit on the nodes",
            )  # fmt: skip
    if wanted <= total:
        yield from _surge_room(document, total - wanted)


def _surge_room(document: Document, free: float) -> Iterator[Finding]:
    """Whether a successor finds a GPU while there are as many replicas as there may be."""
    for path, gpus, count in replica_gpus(document):
        if gpus > free and document.get(*path[:-1], "surge") is True:
            yield document.find(
                "warn", (*path[:-1], "surge"), f"with {count} replicas the nodes have {free:g} GPUs left, and a successor asks for {gpus:g} "
                "beside the one that it replaces: an update would wait for its place for good",
                "a larger limit on the nodes, fewer replicas, or surge: false",
            )  # fmt: skip


def _open_ports(document: Document) -> Iterator[Finding]:
    if document.get("proxy_location", default="EveryNode") != "Disabled":
        yield document.find(
            "fail", ("proxy_location",), "Serve starts an HTTP proxy on every node: an open port through which no request of ours comes",
            "proxy_location: Disabled",
        )  # fmt: skip
    for name in ("http_options", "grpc_options"):
        if document.get(name):
            yield document.find(
                "warn",
                (name,),
                "these options are about Serve's proxies, which a pool does not use",
                f"leave {name} out",
            )


def _route(document: Document, path: Path, application: dict[str, Any]) -> Iterator[Finding]:
    if application.get("import_path") == OUR_IMPORT and application.get("route_prefix", "/") is not None:
        yield document.find(
            "fail", (*path, "route_prefix"), "the application gets an HTTP route, the default being \"/\", and a second application with it is refused",
            "route_prefix: null",
        )  # fmt: skip


def _arguments(document: Document, path: Path) -> Iterator[Finding]:
    from cluster.serve_app import pool_config

    try:
        pool_config(document.mapping(*path))
    except (ValueError, TypeError, AttributeError) as error:
        text = str(error) if isinstance(error, ValueError) else f"a value is of the wrong type ({error})"
        yield document.find(
            "fail",
            _named(document, path, text),
            f"replicas refuse to start with this: {text:.300}",
            "what the message asks for",
        )


def _named(document: Document, path: Path, message: str) -> Path:
    """The place of the first field that a message names."""
    places = {place[-1]: place for place in document.lines if len(place) > len(path) and place[: len(path)] == path}
    names = [name.rpartition(".")[2] for name in re.findall(r"[\w.]+", message)]
    return next((places[name] for name in names if name in places), path)


def _gpu_share(document: Document, path: Path) -> Iterator[Finding]:
    gpus, device = document.get(*path, "num_gpus"), document.get(*path, "worker", "device", default="auto")
    if gpus is None and device == "auto":
        yield document.find(
            "fail", path, "whether a replica gets a GPU is decided where the config is read, on the head, which has none",
            "num_gpus: 1 and worker.device: cuda; or num_gpus: 0 and worker.device: cpu",
        )  # fmt: skip
    if not isinstance(gpus, (int, float)):
        return
    if gpus > 1:
        yield document.find(
            "fail",
            (*path, "num_gpus"),
            f"a replica runs on one GPU; {gpus} would leave {gpus - 1:g} idle",
            "num_gpus: 1, and more replicas",
        )
    if gpus == 0 and device == "cuda":
        yield document.find(
            "fail", (*path, "num_gpus"), "replicas are to run on CUDA, but are given no GPU", "num_gpus: 1"
        )
    if gpus > 0 and device == "cpu":
        yield document.find("warn", (*path, "num_gpus"), "replicas hold GPUs that they do not use", "num_gpus: 0")
    if 0 < gpus < 1 and device != "cpu":
        yield from _fraction(document, path, float(gpus))


def _fraction(document: Document, path: Path, gpus: float) -> Iterator[Finding]:
    sharing = math.floor(1 / gpus + 1e-9)
    memory = document.get(*path, "worker", "gpu_memory_fraction", default=0.85)
    if isinstance(memory, (int, float)) and sharing * memory > 1:
        yield document.find(
            "fail", (*path, "worker", "gpu_memory_fraction"),
            f"{sharing} replicas share a GPU and each takes {memory:g} of its memory: the last ones run out of it",
            f"gpu_memory_fraction: {math.floor(90 / sharing) / 100:g}",
        )  # fmt: skip


def _scaling(document: Document, path: Path, num_applications: int) -> Iterator[Finding]:
    if not document.get(*path, "scaling"):
        return
    if "num_replicas" in document.mapping(*path):
        yield document.find(
            "warn", (*path, "num_replicas"), "with `scaling`, the number does not count", "leave num_replicas out"
        )
    if num_applications > 1 and not document.get(*path, "model_name"):
        yield document.find(
            "fail", (*path, "scaling"), "several models share the routers, and the load of all of them would scale this one",
            "model_name: the model as `graphpool status` shows it",
        )  # fmt: skip


def _limits(document: Document, path: Path) -> Iterator[Finding]:
    worker = document.mapping(*path, "worker")
    if worker.get("max_model_len") is None and worker.get("tiers") is None:
        yield document.find(
            "warn", (*path, "worker"), "no max_model_len: one request may be as long as the model allows, and memory is kept for it",
            "max_model_len: the longest prompt and answer that you want to serve",
        )  # fmt: skip
    if worker.get("max_batch") is None and worker.get("buckets") is None:
        yield document.find(
            "warn",
            (*path, "worker"),
            "no max_batch: up to 256 sequences are decoded together on a GPU",
            "max_batch: a number, after `graphpool plan` has shown what fits",
        )


def _drain(document: Document, path: Path, step_ms: float | None) -> Iterator[Finding]:
    device = document.get(*path, "worker", "device", default="auto")
    tokens = document.get(*path, "worker", "max_model_len")
    grace_s = document.get(*path, "drain_timeout_s", default=120.0)
    step = step_ms or STEP_MS.get(str(device), STEP_MS["cuda"])
    if not isinstance(tokens, int) or not isinstance(grace_s, (int, float)):
        return
    longest_s = tokens * step / 1000
    if grace_s < longest_s:
        yield document.find(
            "fail", (*path, "drain_timeout_s"),
            f"a replica that is taken away has {grace_s:g} s, but an answer of {tokens} tokens at {step:g} ms takes {longest_s:.0f} s: it would be cut off",
            f"drain_timeout_s: {math.ceil(longest_s / 10) * 10}, or a smaller max_model_len, or --step-ms with what you measured",
        )  # fmt: skip


def _replica(document: Document, path: Path) -> Iterator[Finding]:
    replica = document.mapping(*path, "replica")
    listen = str(replica.get("listen", "127.0.0.1:0"))
    if listen.startswith(("127.", "localhost", "[::1]")):
        yield document.find(
            "fail", (*path, "replica", "listen"), "replicas listen on loopback: a router on another node cannot dial them",
            "listen: 0.0.0.0:0 and advertise: node-address",
        )  # fmt: skip
    if replica.get("insecure") is True:
        yield document.find(
            "warn", (*path, "replica", "insecure"), "prompts and answers travel between the nodes in the clear, and any node may ask replicas",
            "security: {tls_cert: ..., tls_key: ..., tls_ca: ...} with files that `graphpool certs` makes",
        )  # fmt: skip


def _replica_names(document: Document, path: Path, names: dict[str, int]) -> Iterator[Finding]:
    name = document.get(*path, "replica", "name")
    if not name:
        return
    is_one = document.get(*path, "num_replicas", default=1) == 1 and not document.get(*path, "scaling")
    if not is_one or name in names:
        yield document.find(
            "fail",
            (*path, "replica", "name"),
            f"several replicas would be called {name!r}, and the router keeps one of a name",
            "leave name out: each gets its own",
        )
    names[name] = 1
