"""A private CA in a folder: it signs the certificates of routers, replicas and clients, and replaces them with overlap."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster.security.config import DOMAIN
from cluster.security.private_file import write_private

CA, CA_KEY = "ca.pem", "ca-key.pem"
CA_DAYS, CERT_DAYS = 3650, 90
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of different machines differ."""


class CertRole(StrEnum):
    """What a certificate's owner is; its name is in the certificate as ROLE.graphpool.internal."""

    ROUTER = "router"
    REPLICA = "replica"
    CLIENT = "client"
    OPERATOR = "operator"


class CertificateFolder:
    """`ca.pem` (every CA that is trusted, newest first), `ca-key.pem` (the newest one's), and NAME.pem, NAME-key.pem."""

    def __init__(self, folder: Path, *, now: datetime.datetime | None = None) -> None:
        self.folder = folder
        self._now = now or datetime.datetime.now(datetime.UTC)

    @property
    def names(self) -> list[str]:
        """Of the certificates that were issued."""
        keys = sorted(path.name.removesuffix("-key.pem") for path in self.folder.glob("*-key.pem"))
        return [name for name in keys if name != "ca"]

    def create(self, days: int = CA_DAYS) -> None:
        """Make the folder and its CA. Raises FileExistsError when there is one."""
        if (self.folder / CA).exists():
            raise FileExistsError(17, "there is a CA already", str(self.folder / CA))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_ca(days, ())

    def issue(self, name: str, roles: Sequence[CertRole], hosts: Sequence[str] = (), days: int = CERT_DAYS) -> Path:
        """Make or replace NAME.pem and its key: for these roles, at these hosts. Returns the certificate's path."""
        if name == "ca" or "/" in name or not name.isprintable() or not 0 < len(name) <= 64:
            raise ValueError(f"{name!r:.80} cannot be the name of a certificate")
        names = [_general_name(host) for host in (*(f"{role.value}.{DOMAIN}" for role in roles), *hosts)]
        return self._issue(name, x509.SubjectAlternativeName(dict.fromkeys(names)), days)

    def renew(self, days: int = CERT_DAYS) -> list[str]:
        """Issue every certificate again, with new keys, for the same names, by the newest CA."""
        for name in self.names:
            old = x509.load_pem_x509_certificates((self.folder / f"{name}.pem").read_bytes())[0]
            self._issue(name, old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value, days)
        return self.names

    def add_ca(self, days: int = CA_DAYS) -> None:
        """Make a new CA that signs from now on; what the old ones signed is still trusted."""
        self._write_ca(days, self._cas())

    def retire_old_cas(self) -> int:
        """Trust the newest CA alone; returns how many others there were. Raises ValueError if one is still needed."""
        newest, *old = self._cas()
        for name in self.names:
            certificate = x509.load_pem_x509_certificates((self.folder / f"{name}.pem").read_bytes())[0]
            if certificate.issuer != newest.subject:
                raise ValueError(f"{name}.pem is signed by an old CA: `graphpool certs rotate` first")
        write_private(self.folder / CA, _pem(newest))
        return len(old)

    def expiry(self, name: str) -> datetime.datetime:
        """When a certificate ends; "ca" = the newest CA's."""
        return x509.load_pem_x509_certificates((self.folder / f"{name}.pem").read_bytes())[0].not_valid_after_utc

    def _issue(self, name: str, names: x509.SubjectAlternativeName, days: int) -> Path:
        ca_key = serialization.load_pem_private_key((self.folder / CA_KEY).read_bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        ca = self._cas()[0]
        key = ec.generate_private_key(ec.SECP256R1())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            self._builder(_subject(name), ca.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(usages, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        path = self.folder / f"{name}.pem"
        # The key first: a reader that meets the pair half written keeps what it has until both fit.
        write_private(self.folder / f"{name}-key.pem", _key_pem(key))
        write_private(path, _pem(certificate))
        return path

    def _write_ca(self, days: int, others: Sequence[x509.Certificate]) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"graphpool CA {os.urandom(4).hex()}")
        certificate = (
            self._builder(subject, subject, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_ca_usage(), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(self.folder / CA_KEY, _key_pem(key))
        write_private(self.folder / CA, b"".join(map(_pem, (certificate, *others))))

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            subject_name=subject,
            issuer_name=issuer,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=self._now - BACKDATED,
            not_valid_after=self._now + datetime.timedelta(days=days),
        )

    def _cas(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates((self.folder / CA).read_bytes())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise ValueError for the first that no certificate can name."""
    for host in hosts:
        _general_name(host)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise ValueError(
                f"host {host!r:.60} is neither a name nor an address of a machine, without a port"
            ) from None
        return x509.DNSName(host)


def _ca_usage() -> x509.KeyUsage:
    names = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**dict.fromkeys(names, False), digital_signature=True, key_cert_sign=True, crl_sign=True)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
