"""Checks of the Python packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cluster.doctor.finding import Check, Finding

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
FLOORS = {
    "torch": (2, 11),
    "transformers": (5, 17),
    "safetensors": (0, 6),
    "ray": (2, 60),
    "grpcio": (1, 76),
    "protobuf": (6, 31, 1),
}
"""The oldest releases that work, as in pyproject.toml."""
_INSTALL = "install the project again: make setup"


def package_checks() -> list[Check]:
    """Python, every package, and gRPC over loopback."""
    packages: list[Check] = [(name, partial(check_package, name)) for name in FLOORS]
    return [
        ("python", check_python),
        *packages,
        ("triton", check_triton),
        ("stubs", check_stubs),
        ("grpc loopback", check_loopback),
    ]


def check_python() -> Finding:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return Finding("python", "ok", version)
    return Finding("python", "fail", version, "use Python 3.11, 3.12 or 3.13")


def check_package(name: str) -> Finding:
    """Whether it is installed, and new enough."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", _INSTALL)
    if version_tuple(version) < FLOORS[name]:
        floor = ".".join(map(str, FLOORS[name]))
        return Finding(name, "fail", f"{version} is older than {floor}", f"pip install '{name}>={floor}'")
    return Finding(name, "ok", version)


def check_triton() -> Finding:
    """Triton compiles kernels on the GPU; without one nothing needs it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Finding("triton", "warn", "not installed", "it comes with torch for CUDA; CPU workers do not need it")
    return Finding("triton", "ok", version)


def check_stubs() -> Finding:
    """Whether the committed stubs load with the protobuf that is installed."""
    importlib.import_module("protos.generation_pb2_grpc")
    return Finding("stubs", "ok", "the wire contract loads")


def check_loopback() -> Finding:
    """Whether a gRPC server on this machine can be reached from this machine."""
    import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        return Finding(
            "grpc loopback",
            "fail",
            "no connection within 5 s",
            "a proxy or firewall takes 127.0.0.1: set no_proxy=127.0.0.1",
        )
    finally:
        server.stop(None)
    return Finding("grpc loopback", "ok", "connected")


def version_tuple(version: str) -> tuple[int, ...]:
    """(2, 11, 0) of "2.11.0+cu130"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
