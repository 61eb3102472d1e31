"""What a server of the pool shows when it dials another one."""

from __future__ import annotations

import functools
from typing import Any

import grpc

from cluster.security.channel import OVERRIDE, TokenChannel
from cluster.security.config import SecurityConfig
from cluster.security.secret_file import read_secret
from cluster.security.tls import ServerCertificates
from cluster.security.watched_file import WatchedFiles


class Identity:
    """Its certificate and the pool's secret, read again when they change. Raises OSError or ValueError when made."""

    def __init__(self, config: SecurityConfig) -> None:
        self._certificates = ServerCertificates(config) if config.has_tls else None
        self._has_private_ca = bool(config.tls_ca)
        self._secret = (
            WatchedFiles([config.pool_token], lambda: read_secret(config.pool_token)) if config.pool_token else None
        )

    @property
    def num_changes(self) -> int:
        """A channel that was opened before the latest change has an old certificate."""
        return 0 if self._certificates is None else self._certificates.num_changes

    def open_channel(self, address: str, options: list[tuple[str, Any]], *, peer: str) -> Any:
        """A channel to a server whose certificate must hold the name `peer`, if it is of our own CA.

        Replicas come and go at any address, so their role is what counts; with a public CA it is the host.
        """
        if self._certificates is None:
            channel: Any = grpc.aio.insecure_channel(address, options=options)
        else:
            named = [*options, (OVERRIDE, peer)] if self._has_private_ca else options
            channel = grpc.aio.secure_channel(address, self._certificates.channel_credentials(), options=named)
        return channel if self._secret is None else TokenChannel(channel, self._secret.get)


@functools.lru_cache(maxsize=64)
def identity_of(config: SecurityConfig) -> Identity:
    """One for each configuration: its files are watched, not read for each connection."""
    return Identity(config)
