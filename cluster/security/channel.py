"""Channels that say who calls and make sure of whom they call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from cluster.config import is_loopback, split_address
from cluster.security.config import ClientSecurity
from cluster.security.tokens import bearer_metadata

TOKEN_VARIABLE = "GRAPHPOOL_TOKEN"  # noqa: S105  # its name
Metadata = Sequence[tuple[str, str]]
OVERRIDE = "grpc.ssl_target_name_override"


class MetadataChannel:
    """A channel, of either kind, whose every call carries more metadata.

    Calls take it as an argument and nothing else is put between: an interceptor would cost every message of a stream.
    `metadata` is asked at each call.
    """

    def __init__(self, channel: Any, metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.Channel; the three below too."""
        return self._with_more(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._with_more(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._with_more(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._with_more(self._channel.stream_stream(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> MetadataChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def __enter__(self) -> MetadataChannel:
        self._channel.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._channel.__exit__(*error)

    def _with_more(self, method: Any) -> Any:
        def call(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*arguments, metadata=(*(metadata or ()), *self._metadata()), **options)

        return call


class TokenChannel(MetadataChannel):
    """A channel whose every call carries a token."""

    def __init__(self, channel: Any, token: Callable[[], str]) -> None:
        super().__init__(channel, lambda: bearer_metadata(token()))


def open_channel(
    target: str, security: ClientSecurity, options: list[tuple[str, Any]], token: str | None
) -> grpc.Channel:
    """A client's channel, with this token, the one configured or that of GRAPHPOOL_TOKEN.

    Raises ValueError for a token that would travel in the clear, and what is wrong with the certificates' files.
    """
    channel: grpc.Channel = _open(grpc, target, security, options, token)
    return channel


def open_aio_channel(
    target: str, security: ClientSecurity, options: list[tuple[str, Any]], token: str | None
) -> grpc.aio.Channel:
    """The same for asyncio."""
    channel: grpc.aio.Channel = _open(grpc.aio, target, security, options, token)
    return channel


def _open(api: Any, target: str, security: ClientSecurity, options: list[tuple[str, Any]], token: str | None) -> Any:
    security = replace(security, token=token or security.token or os.environ.get(TOKEN_VARIABLE, "").strip())
    if security.has_tls:
        from cluster.security.tls import client_credentials

        if security.tls_name:
            options = [*options, (OVERRIDE, security.tls_name)]
        channel = api.secure_channel(target, client_credentials(security), options=options)
    else:
        _check_plain(target, security)
        channel = api.insecure_channel(target, options=options)
    return TokenChannel(channel, lambda: security.token) if security.token else channel


def _check_plain(target: str, security: ClientSecurity) -> None:
    if not security.token or security.insecure or target.startswith(("unix:", "unix-abstract:")):
        return
    try:
        is_here = is_loopback(split_address("target", target)[0])
    except ValueError:
        is_here = False
    if not is_here:
        raise ValueError(f"the token would travel to {target} in the clear: use TLS, or say insecure")
