"""`graphpool tokens`: who may call, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import options
from cluster.cli.running import one_sentence_errors

File = Annotated[
    Path,
    typer.Option(
        "--file", parser=options.path, metavar="FILE", help="The file of tenants; servers read it with --tokens."
    ),
]
DEFAULT_FILE = Path("tenants.yaml")

tokens = typer.Typer(name="tokens", help="Tokens of tenants, and their quotas.", no_args_is_help=True)


@tokens.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Who gets it; made if need be.")],
    file: File = DEFAULT_FILE,
    role: Annotated[
        list[str] | None,
        typer.Option(help="user (generates), operator (steers too) or monitor (looks); several are possible."),
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Tokens of prompts and answers a second, in the long run.")
    ] = None,
    burst_tokens: Annotated[float | None, typer.Option(min=1, help="As many at once after a rest.")] = None,
    max_streams: Annotated[int | None, typer.Option(min=1, help="Requests answered at the same time.")] = None,
    weight: Annotated[float | None, typer.Option(min=0.01, max=100, help="Share of a full pool. Default: 1.")] = None,
) -> None:
    """Make a token and print it, this once: only its hash is kept. Running servers know it within a second."""
    with one_sentence_errors():
        from cluster.security.caller import Role
        from cluster.security.tenants import add_token

        try:
            roles = tuple(Role(one) for one in role or ())
        except ValueError:
            raise typer.BadParameter(f"{', '.join(role or ())} is not user, operator or monitor") from None
        limits = {
            "tokens_per_s": tokens_per_s,
            "burst_tokens": burst_tokens,
            "max_streams": max_streams,
            "weight": weight,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        typer.echo(add_token(file, tenant, roles=roles, limits=given))


@tokens.command()
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The part of a token after gp_, eight digits.")],  # noqa: A002
    file: File = DEFAULT_FILE,
) -> None:
    """Take a token away. Running servers refuse it within a second."""
    with one_sentence_errors():
        from cluster.security.tenants import revoke_token

        typer.echo(f"token {id} of {revoke_token(file, id)} is revoked")


@tokens.command("list")
def show(file: File = DEFAULT_FILE) -> None:
    """Show the tenants: roles, limits and the ids of their tokens."""
    with one_sentence_errors():
        from cluster.security.tenants import read_tenants

        for tenant in read_tenants(str(file)).by_name.values():
            quota = tenant.quota
            roles = ",".join(sorted(tenant.roles))
            ids = " ".join(credential.id for credential in tenant.credentials) or "none"
            streams = quota.max_streams or "unlimited"
            typer.echo(f"{tenant.name}  {roles}  {quota.tokens_per_s:g} tokens/s  {streams} streams  tokens: {ids}")


@tokens.command()
def pool(path: Annotated[Path, typer.Argument(parser=options.path, metavar="FILE", help="Where to write it.")]) -> None:
    """Make the secret that routers and replicas show each other; each of them reads it with --pool-token."""
    with one_sentence_errors():
        from cluster.security.secret_file import write_secret

        write_secret(path)
        typer.echo(path)
