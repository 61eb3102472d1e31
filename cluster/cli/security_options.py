"""Options about certificates and tokens, for servers and for clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.options import path
from cluster.cli.running import usage_errors

if TYPE_CHECKING:
    from cluster.config import ClientConfig
    from cluster.security.config import SecurityConfig

SECURITY = "Security"


def _file(help_text: str) -> Any:
    return typer.Option(parser=path, metavar="FILE", help=help_text, rich_help_panel=SECURITY)


TlsCert = Annotated[Path | None, _file("Certificate to show, in PEM. Read again when it changes.")]
TlsKey = Annotated[Path | None, _file("Key of --tls-cert.")]
TlsCa = Annotated[Path | None, _file("CAs that sign the other side's certificates, in PEM.")]
ClientCerts = Annotated[
    bool,
    typer.Option(
        "--client-certs/--no-client-certs",
        help="With --tls-ca: refuse callers without a certificate of it.",
        rich_help_panel=SECURITY,
    ),
]
Tokens = Annotated[Path | None, _file("Tenants and their tokens, as `graphpool tokens create` writes it.")]
PoolToken = Annotated[Path | None, _file("Secret that routers and replicas show each other.")]
TokenFile = Annotated[Path | None, _file("Token to show. Default: that of $GRAPHPOOL_TOKEN, or none.")]
ClearToken = Annotated[
    bool,
    typer.Option("--insecure", help="Send the token to another machine without TLS.", rich_help_panel=SECURITY),
]


def server_security(
    *,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    client_certs: bool,
    tokens: Path | None,
    pool_token: Path | None,
) -> SecurityConfig:
    """What a server asks for; a combination that cannot be is a usage error."""
    from cluster.security.config import SecurityConfig

    with usage_errors():
        return SecurityConfig(
            tls_cert=_text(tls_cert),
            tls_key=_text(tls_key),
            tls_ca=_text(tls_ca),
            client_certs=client_certs,
            tokens=_text(tokens),
            pool_token=_text(pool_token),
        )


def client_config(
    *, token_file: Path | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, insecure: bool
) -> ClientConfig:
    """How a client says who it is. Raises OSError for a file that cannot be read."""
    from cluster.config import ClientConfig
    from cluster.security.config import ClientSecurity

    token = "" if token_file is None else token_file.read_text(encoding="utf-8").strip()
    with usage_errors():
        return ClientConfig(
            security=ClientSecurity(
                tls_ca=_text(tls_ca), tls_cert=_text(tls_cert), tls_key=_text(tls_key), token=token, insecure=insecure
            )
        )


def _text(file: Path | None) -> str:
    return "" if file is None else str(file)
