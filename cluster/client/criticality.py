"""Calls that say what they are worth when there is too much work."""

from __future__ import annotations

from typing import Any

from cluster.config import ClientConfig
from cluster.criticality import DEFAULT, KEY, NAMES
from cluster.security.channel import MetadataChannel


def with_criticality(channel: Any, config: ClientConfig) -> Any:
    """The same channel, of either kind, if its calls are as critical as any; else one whose calls say what they are."""
    if NAMES[config.criticality] is DEFAULT:
        return channel
    return MetadataChannel(channel, lambda: ((KEY, config.criticality),))
