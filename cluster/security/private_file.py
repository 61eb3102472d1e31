"""Files that only their owner can read."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger(__name__)


def warn_if_open(path: Path) -> None:
    """Say when others than its owner can read a file that holds a secret."""
    mode = path.stat().st_mode
    if mode & 0o077:
        log.warning("%s can be read by others than its owner (mode %03o)", path, mode & 0o777)


def write_private(path: Path, content: str | bytes) -> None:
    """Make or replace a file at once; whoever reads it meanwhile reads the old one or the new one."""
    raw = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
