"""Which graphpool this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version; "unknown" in a checkout that is not installed."""
    try:
        return metadata.version("graphpool")
    except metadata.PackageNotFoundError:
        return "unknown"
