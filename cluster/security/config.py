"""What protects a server, and what a client shows. Raises ValueError naming the value that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

DOMAIN = "graphpool.internal"
"""A certificate of a private CA says what its owner is by a DNS name under it: router.graphpool.internal."""
ROUTER_NAME, REPLICA_NAME = f"router.{DOMAIN}", f"replica.{DOMAIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Certificates and tokens of a router or a replica; it also dials its own kind with them.

    All values but `client_certs` are paths. The files are read again when they change, without dropping a stream.
    """

    tls_cert: str = ""
    """PEM file: the certificate this server shows, and what leads from it to its CA. Empty = no TLS."""
    tls_key: str = ""
    """PEM file: the key of that certificate."""
    tls_ca: str = ""
    """PEM file: the CAs that sign the certificates of routers, replicas and clients. Empty = the system's."""
    client_certs: bool = True
    """With `tls_ca`: callers must show a certificate of one of these CAs."""
    tokens: str = ""
    """YAML file of tenants, the hashes of their tokens and their quotas. Empty = no tokens are asked for."""
    pool_token: str = ""
    """File with the secret that routers and replicas show each other, beside or instead of certificates."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: a certificate is of no use without its key")
        if self.tls_ca and not self.tls_cert:
            raise ValueError(f"tls_ca {self.tls_ca!r} needs tls_cert and tls_key: without them there is no TLS")

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.tls_cert)

    @property
    def http(self) -> str:
        """The scheme of the metrics' address."""
        return "https" if self.has_tls else "http"

    @property
    def wants_client_certs(self) -> bool:
        """Whether a connection without a certificate of ours is refused."""
        return bool(self.tls_ca) and self.client_certs

    @property
    def asks_who(self) -> bool:
        """Whether callers must say who they are."""
        return bool(self.tokens or self.pool_token) or self.wants_client_certs

    @property
    def is_protected(self) -> bool:
        """Whether others than this machine may be let near: nothing in the clear, and nobody unknown."""
        return self.has_tls and (bool(self.tokens) or self.wants_client_certs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """How a client makes sure of the server, and how it says who it is. All are paths."""

    tls_ca: str = ""
    """PEM file: the CAs that may have signed the server's certificate."""
    tls_cert: str = ""
    """PEM file: the client's own certificate, where the server asks for one."""
    tls_key: str = ""
    """PEM file: the key of that certificate."""
    tls_name: str = ""
    """The name the server's certificate must hold; empty = the host that is dialed."""
    use_tls: bool = False
    """Use TLS with the system's CAs; `tls_ca` uses it anyway."""
    insecure: bool = False
    """Send a token in the clear to another machine."""
    token: str = field(default="", repr=False)
    """Shown with every call."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: a certificate is of no use without its key")
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise ValueError("token is not one of printable ASCII characters without spaces")

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.use_tls or bool(self.tls_ca or self.tls_cert)
