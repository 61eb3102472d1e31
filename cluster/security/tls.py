"""Certificates as gRPC and HTTP take them, read again when their files change."""

from __future__ import annotations

import datetime
import logging
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from cluster.security.config import ClientSecurity, SecurityConfig
from cluster.security.private_file import warn_if_open
from cluster.security.watched_file import WatchedFiles

WARN_BEFORE = datetime.timedelta(days=14)
WARN_PERIOD_S = 12 * 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    """The content of the files; empty where there is none."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    ends: datetime.datetime | None = None
    """When the certificate is over."""


def read_pems(cert: str, key: str, ca: str) -> Pems:
    """Raises OSError, or ValueError for a certificate that is over, not yet valid or of another key."""
    pems = Pems(_content(cert), _content(key), _content(ca))
    if pems.cert:
        warn_if_open(Path(key))
        pems = replace(pems, ends=_check_pair(cert, key, pems))
    if pems.ca:
        _check_ca(ca, pems.ca)
    return pems


class ServerCertificates:
    """Of one server; raises like `read_pems` when it is made."""

    def __init__(self, config: SecurityConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        paths = [path for path in (config.tls_cert, config.tls_key, config.tls_ca) if path]
        self._files = WatchedFiles(
            paths, lambda: read_pems(config.tls_cert, config.tls_key, config.tls_ca), clock=clock
        )
        self._served: Pems | None = None
        self._clock = clock
        self._warned_s = -math.inf

    @property
    def pems(self) -> Pems:
        """What the files hold now; what they held before while they cannot be used."""
        pems = self._files.get()
        self._warn_of_end(pems)
        return pems

    @property
    def num_changes(self) -> int:
        """How often they were read again."""
        return self._files.num_changes

    def credentials(self) -> grpc.ServerCredentials:
        """gRPC asks at every handshake whether the certificate has changed; open connections stay as they are."""
        self._served = self.pems
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(self._served),
            self._fetch,  # type: ignore[arg-type]  # None = nothing has changed, which the stub does not know
            require_client_authentication=self._config.wants_client_certs,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For dialing another server of the pool, with this one's own certificate."""
        pems = self.pems
        return grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)

    def _warn_of_end(self, pems: Pems) -> None:
        """While there is still time, and not at every handshake."""
        if pems.ends is None or self._clock() - self._warned_s < WARN_PERIOD_S:
            return
        left = pems.ends - datetime.datetime.now(datetime.UTC)
        if left < WARN_BEFORE:
            self._warned_s = self._clock()
            log.warning(
                "%s ends in %.1f days, at %s", self._config.tls_cert, left / datetime.timedelta(days=1), pems.ends
            )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        pems = self.pems
        if pems == self._served:
            return None
        self._served = pems
        return self._configuration(pems)

    def _configuration(self, pems: Pems) -> grpc.ServerCertificateConfiguration:
        roots = pems.ca if self._config.wants_client_certs else None
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], roots)


class HttpContext:
    """An SSL context for one HTTP port, of the same files."""

    def __init__(self, certificates: ServerCertificates, config: SecurityConfig) -> None:
        self._certificates = certificates
        self._config = config
        self._made_of: Pems | None = None
        self._context: ssl.SSLContext | None = None

    def get(self) -> ssl.SSLContext:
        """The present one."""
        pems = self._certificates.pems
        if self._context is None or pems != self._made_of:
            self._context, self._made_of = self._create(pems), pems
        return self._context

    def _create(self, pems: Pems) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._config.tls_cert, self._config.tls_key)
        if self._config.wants_client_certs:
            context.load_verify_locations(cadata=pems.ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def client_credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    """Of a client. Raises like `read_pems`."""
    pems = read_pems(security.tls_cert, security.tls_key, security.tls_ca)
    return grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)


def _content(path: str) -> bytes:
    return Path(path).read_bytes() if path else b""


def _check_pair(cert: str, key: str, pems: Pems) -> datetime.datetime:
    """When the certificate ends."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificates(pems.cert)[0]
        private = load_pem_private_key(pems.key, None)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{cert} and {key} are not a certificate and its key in PEM") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*form) != private.public_key().public_bytes(*form):
        raise ValueError(f"{key} is not the key of {cert}")
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc < now:
        raise ValueError(f"{cert} has expired, at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if certificate.not_valid_before_utc > now:
        raise ValueError(f"{cert} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
    return certificate.not_valid_after_utc


def _check_ca(path: str, pem: bytes) -> None:
    from cryptography import x509

    try:
        x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{path} holds no certificates in PEM") from error
