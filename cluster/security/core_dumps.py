"""What a process holds of its clients stays in it."""

from __future__ import annotations

import resource


def refuse_core_dumps() -> None:
    """A crash writes no memory to disk: prompts, answers and tokens would be in it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
