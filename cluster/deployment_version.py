"""The version of a deployment: what its replicas are made of, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

from cluster.version import version


def code_version(*parts: Any) -> str:
    """The same for equal parts, in every process: plain values and configs, of which this version of the code makes replicas.

    Numbers count by their value (8 is 8.0), tuples are lists, and mappings have no order. TypeError for anything else.
    """
    text = json.dumps([version(), *map(_canonical, parts)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _canonical(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _canonical(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _canonical(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(one) for one in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
