"""A pool on one machine makes the secret its parts show each other by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.security.config import SecurityConfig
from cluster.security.secret_file import write_secret


class LocalSecret:
    """In a folder that its owner alone can open, until `close`. Nothing is made where nobody is asked who calls."""

    def __init__(self, security: SecurityConfig) -> None:
        self.security = security
        """The same settings with a secret in them."""
        self._folder: TemporaryDirectory[str] | None = None
        if security.asks_who and not security.pool_token:
            self._folder = TemporaryDirectory(prefix="graphpool-secret-")
            path = Path(self._folder.name) / "pool-token"
            write_secret(path)
            self.security = replace(security, pool_token=str(path))

    def close(self) -> None:
        """Forget it."""
        if self._folder is not None:
            self._folder.cleanup()
