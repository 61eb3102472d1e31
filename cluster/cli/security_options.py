"""Options about certificates and tokens, for servers and for clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.running import usage_errors

if TYPE_CHECKING:
    from cluster.config import ClientConfig
    from cluster.security.config import SecurityConfig

SECURITY = "Security"

TlsCert = Annotated[
    str,
    typer.Option(
        metavar="FILE", help="Certificate to show, in PEM. Read again when it changes.", rich_help_panel=SECURITY
    ),
]
TlsKey = Annotated[str, typer.Option(metavar="FILE", help="Key of --tls-cert.", rich_help_panel=SECURITY)]
TlsCa = Annotated[
    str,
    typer.Option(metavar="FILE", help="CAs that sign the other side's certificates, in PEM.", rich_help_panel=SECURITY),
]
ClientCerts = Annotated[
    bool,
    typer.Option(
        "--client-certs/--no-client-certs",
        help="With --tls-ca: refuse callers without a certificate of it.",
        rich_help_panel=SECURITY,
    ),
]
Tokens = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Tenants and their tokens, as `graphpool tokens create` writes it.",
        rich_help_panel=SECURITY,
    ),
]
PoolToken = Annotated[
    str,
    typer.Option(metavar="FILE", help="Secret that routers and replicas show each other.", rich_help_panel=SECURITY),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Token to show. Default: that of $GRAPHPOOL_TOKEN, or none.", rich_help_panel=SECURITY
    ),
]
ClearToken = Annotated[
    bool,
    typer.Option("--insecure", help="Send the token to another machine without TLS.", rich_help_panel=SECURITY),
]


def server_security(
    *, tls_cert: str, tls_key: str, tls_ca: str, client_certs: bool, tokens: str, pool_token: str
) -> SecurityConfig:
    """What a server asks for; a combination that cannot be is a usage error."""
    from cluster.security.config import SecurityConfig

    with usage_errors():
        return SecurityConfig(
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            client_certs=client_certs,
            tokens=tokens,
            pool_token=pool_token,
        )


def client_config(*, token_file: Path | None, tls_ca: str, tls_cert: str, tls_key: str, insecure: bool) -> ClientConfig:
    """How a client says who it is. Raises OSError for a file that cannot be read."""
    from cluster.config import ClientConfig
    from cluster.security.config import ClientSecurity

    token = "" if token_file is None else token_file.read_text(encoding="utf-8").strip()
    with usage_errors():
        return ClientConfig(
            security=ClientSecurity(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token, insecure=insecure)
        )
