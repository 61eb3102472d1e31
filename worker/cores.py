"""How many cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Those it may run on, or fewer where its container's share of processor time is smaller; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    shares = [share for share in (_share(folder) for folder in _folders()) if share]
    return max(1, min(allowed, *(int(share) for share in shares)) if shares else allowed)


def _folders() -> list[Path]:
    """Where limits of this process may be: a container sees its own group as the root, or at the path of its host."""
    found = [CGROUPS, CGROUPS / "cpu"]
    try:
        lines = OF_PROCESS.read_text().splitlines()
    except OSError:
        return found
    paths = [line.split(":", 2)[2].lstrip("/") for line in lines if line.startswith("0::")]
    return found + [CGROUPS / path for path in paths if path]


def _share(folder: Path) -> float | None:
    """Cores' worth of time in each period, by either version of control groups; None without a limit."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max" is no number
        return None
