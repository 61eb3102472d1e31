"""The secret that routers and replicas of one pool share."""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster.security.private_file import warn_if_open, write_private

MIN_SECRET_CHARS = 20


def read_secret(path: str) -> str:
    """From its file. Raises OSError, or ValueError for one that can be guessed."""
    warn_if_open(Path(path))
    secret = Path(path).read_text(encoding="ascii").strip()
    if len(secret) < MIN_SECRET_CHARS or " " in secret or not secret.isprintable():
        raise ValueError(f"{path} must hold one line of at least {MIN_SECRET_CHARS} printable characters")
    return secret


def write_secret(path: Path) -> None:
    """A new one."""
    write_private(path, secrets.token_urlsafe(32) + "\n")
