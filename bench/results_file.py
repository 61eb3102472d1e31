"""Writes one benchmark's newest result: `bench/results/<bench>.json`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).resolve().parent / "results"

Scope = Literal["step", "replica", "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value."""

    system: str
    model: str
    metric: str
    unit: str
    value: float
    scope: Scope
    batch: int | None = None
    context: int | None = None
    note: str | None = None


@dataclass(slots=True, kw_only=True)
class Results:
    """Everything one run found, and what made sure that it counted only right answers."""

    bench: str
    hardware: str
    correctness: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        """Append a Row."""
        self.rows.append(Row(**values))

    def write(self, folder: Path = RESULTS) -> Path:
        """Replace the older result of this benchmark."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        document = {
            "bench": self.bench,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m bench." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
            "hardware": self.hardware,
            "versions": versions(),
            "correctness": self.correctness,
            "rows": [{k: v for k, v in asdict(row).items() if v is not None} for row in self.rows],
            **self.extra,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter to speed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "grpcio", "ray", "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Processor model and number of cores this process may use."""
    import os

    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"
