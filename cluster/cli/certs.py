"""`graphpool certs`: certificates of a private CA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import path
from cluster.cli.running import one_sentence_errors

if TYPE_CHECKING:
    from cluster.security.certs import CertificateFolder

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

Folder = Annotated[Path, typer.Argument(parser=path, metavar="DIR", help="Where the CA and its certificates lie.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="A name or address that others dial; may be given several times."),
]
Days = Annotated[int, typer.Option(min=1, max=3650, help="How long certificates are valid.")]

certs = typer.Typer(
    name="certs",
    help="Certificates for TLS between clients, routers and replicas, of a CA of your own.",
    no_args_is_help=True,
)


@certs.command()
def init(folder: Folder, host: Hosts = None, days: Days = 90) -> None:
    """Make a CA and first certificates: pool (for `serve`), router, replica, client, operator.

    Keep ca-key.pem away from the servers; they need ca.pem, and a certificate with its key.
    """
    with one_sentence_errors():
        from cluster.security.certs import CertificateFolder, CertRole, check_hosts

        check_hosts(host or ())
        made = CertificateFolder(folder)
        made.create()
        hosts = (*LOCAL_HOSTS, *(host or ()))
        made.issue("pool", [CertRole.ROUTER, CertRole.REPLICA], hosts, days)
        made.issue("router", [CertRole.ROUTER], hosts, days)
        made.issue("replica", [CertRole.REPLICA], hosts, days)
        made.issue("client", [CertRole.CLIENT], (), days)
        made.issue("operator", [CertRole.OPERATOR, CertRole.CLIENT], (), days)
        _list(made)


@certs.command()
def issue(
    folder: Folder,
    role: Annotated[str, typer.Argument(help="router, replica, client or operator; several with commas.")],
    name: Annotated[str, typer.Option(help="Of the files, and of the owner. Default: the role.")] = "",
    host: Hosts = None,
    days: Days = 90,
) -> None:
    """Make one more certificate, or replace one."""
    with one_sentence_errors():
        from cluster.security.certs import CertificateFolder, CertRole

        try:
            roles = [CertRole(one) for one in role.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{role!r} is not router, replica, client or operator") from None
        made = CertificateFolder(folder)
        typer.echo(made.issue(name or roles[0].value, roles, host or (), days))


@certs.command()
def rotate(
    folder: Folder,
    ca: Annotated[
        bool, typer.Option("--ca", help="Make a new CA that signs from now on; the old ones stay trusted.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Trust the newest CA alone.")] = False,
    days: Days = 90,
) -> None:
    """Issue every certificate again, with new keys. Running servers take new files without dropping a stream.

    To change the CA: `rotate --ca` and spread ca.pem, `rotate` and spread the certificates, `rotate --retire` and
    spread ca.pem again.
    """
    with one_sentence_errors():
        from cluster.security.certs import CertificateFolder

        made = CertificateFolder(folder)
        if ca:
            made.add_ca()
        elif retire:
            typer.echo(f"{made.retire_old_cas()} old CAs are trusted no more")
        else:
            made.renew(days)
        _list(made)


def _list(made: CertificateFolder) -> None:
    for name in ("ca", *made.names):
        typer.echo(f"{made.folder / name}.pem  valid until {made.expiry(name):%Y-%m-%d}")
