"""Checks of the machine around the processes: ports, memory, files, environment."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from cluster.doctor.finding import Check, Finding

GIB = 1 << 30
PORTS = {50050: "router", 50051: "worker"}
MIN_FILES, COMFORTABLE_FILES = 1024, 4096
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to
MIN_SHARED_BYTES = 256 << 20
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def machine_checks(cache_dir: Path) -> list[Check]:
    """All of them."""
    return [
        ("ports", lambda: check_ports(PORTS)),
        ("memory", lambda: check_memory(psutil.virtual_memory().available)),
        ("shared memory", lambda: check_shared_memory(SHARED_MEMORY)),
        ("cache folder", lambda: check_cache_dir(cache_dir)),
        ("open files", lambda: check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("environment", lambda: check_environment(os.environ)),
        ("secrets", lambda: check_secrets(os.environ)),
        ("proxies", lambda: check_proxies(os.environ)),
    ]


def check_ports(ports: Mapping[int, str]) -> Finding:
    """Whether the default ports can be bound on loopback."""
    taken = [f"{port} ({role})" for port, role in ports.items() if not _can_bind(port)]
    if not taken:
        return Finding("ports", "ok", f"{', '.join(map(str, ports))} are free")
    return Finding(
        "ports", "warn", f"in use: {', '.join(taken)}", "a pool may be running: `graphpool status`; or choose --port"
    )


def check_memory(available: int) -> Finding:
    """Main memory that processes can still take."""
    text = f"{available / GIB:.1f} GiB available"
    if available < GIB:
        return Finding(
            "memory", "fail", text, "a worker with the embedded model needs about 1 GiB: end other processes"
        )
    if available < 4 * GIB:
        return Finding("memory", "warn", text, "enough for the embedded model on the CPU, not for larger ones")
    return Finding("memory", "ok", text)


def check_shared_memory(path: Path) -> Finding:
    """Ray's object store lives there."""
    if not path.is_dir():
        return Finding("shared memory", "warn", f"there is no {path}", "Ray falls back to files, which are slower")
    free = shutil.disk_usage(path).free
    text = f"{free / GIB:.1f} GiB free in {path}"
    if free < MIN_SHARED_BYTES:
        return Finding("shared memory", "warn", text, "in a container: docker run --shm-size=1g")
    return Finding("shared memory", "ok", text)


def check_cache_dir(path: Path) -> Finding:
    """Converted models are kept there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding(
            "cache folder",
            "fail",
            f"{path} cannot be written: {error.strerror}",
            "use --cache-dir, or set XDG_CACHE_HOME",
        )
    free = shutil.disk_usage(path).free
    text = f"{path}, {free / GIB:.1f} GiB free"
    if free < GIB:
        return Finding(
            "cache folder", "warn", text, "a converted model takes up to 0.5 GiB: make room, or use --cache-dir"
        )
    return Finding("cache folder", "ok", text)


def check_open_files(limit: int) -> Finding:
    """Each stream is a file descriptor, and Ray opens hundreds."""
    text = "no limit" if limit < 0 else f"at most {limit}"
    if 0 <= limit < MIN_FILES:
        return Finding("open files", "fail", text, f"ulimit -n {COMFORTABLE_FILES}")
    if 0 <= limit < COMFORTABLE_FILES:
        return Finding("open files", "warn", text, f"ulimit -n {COMFORTABLE_FILES} before serving many clients")
    return Finding("open files", "ok", text)


def check_environment(environment: Mapping[str, str]) -> Finding:
    """Switches that break or slow captures."""
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        return Finding("environment", "fail", "PYTORCH_NO_CUDA_MEMORY_CACHING: no graph can be captured", "unset it")
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return Finding("environment", "warn", "CUDA_LAUNCH_BLOCKING: every launch waits", "unset it")
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("environment", "warn", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it to use the GPU")
    return Finding("environment", "ok", "nothing that stands in the way of graphs")


def check_secrets(environment: Mapping[str, str]) -> Finding:
    """Secrets that every process of the pool would inherit; their values are never looked at."""
    found = sorted(name for name in environment if any(word in name.upper() for word in _SECRET_WORDS))
    if not found:
        return Finding("secrets", "ok", "none in the environment")
    shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return Finding(
        "secrets",
        "warn",
        f"workers would inherit {shown}",
        f"start the pool without what it does not need: {_unset(found)}",
    )


def check_proxies(environment: Mapping[str, str]) -> Finding:
    """gRPC sends even loopback connections through a proxy, unless it is told not to."""
    proxies = sorted(name for name in environment if name.lower() in _PROXIES and environment[name])
    exempt = ",".join(environment.get(name, "") for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"))
    if not proxies or any(host in exempt for host in ("127.0.0.1", "localhost", "*")):
        return Finding("proxies", "ok", "none in the way of loopback")
    return Finding("proxies", "warn", f"{', '.join(proxies)} set", "export no_proxy=localhost,127.0.0.1")


def _unset(names: Iterable[str]) -> str:
    return "env " + " ".join(f"-u {name}" for name in list(names)[:5]) + " graphpool ..."


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
