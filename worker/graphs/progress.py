"""What a capture session tells while it runs, and a bar that shows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Self

from worker.graphs.key import GraphKey


class CaptureStage(enum.Enum):
    """What has just happened to a key."""

    WARMED = "warmed up"
    CAPTURED = "captured"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureProgress:
    """One step of a capture session."""

    key: GraphKey
    stage: CaptureStage
    done: int
    """Steps finished, this one included."""
    total: int
    """Steps in all, as far as is known."""
    seconds: float
    graph_bytes: int = 0
    """Device memory that this key took."""
    pool_bytes: int
    """Device memory that all graphs have taken."""
    free_bytes: int
    """Free on the device."""
    detail: str = ""
    """Why it was dropped or quarantined; what the self-check found."""


class CaptureBar:
    """Shows a session's progress on standard error: `CaptureSession(..., on_progress=bar)` inside `with CaptureBar() as bar`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Any = Progress(
            TextColumn("capturing"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __enter__(self) -> Self:
        self._bar.start()
        self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: CaptureProgress) -> None:
        """Move the bar; print drops and quarantines above it."""
        self._bar.update(self._task, completed=progress.done, total=progress.total, description=describe(progress))
        if progress.stage in (CaptureStage.DROPPED, CaptureStage.QUARANTINED):
            self._bar.console.print(f"{progress.key} {progress.stage.value}: {progress.detail}")


def describe(progress: CaptureProgress) -> str:
    """One line: key, stage, memory."""
    mib = 1 << 20
    memory = f"graphs {progress.pool_bytes / mib:.0f} MiB, free {progress.free_bytes / mib:.0f} MiB"
    return f"{progress.key} {progress.stage.value}, {memory}"
