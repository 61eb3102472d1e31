"""The commands and what all of them share."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import running
from cluster.cli.certs import certs
from cluster.cli.chat import chat
from cluster.cli.doctor import doctor
from cluster.cli.drain import drain
from cluster.cli.generate import generate
from cluster.cli.plan import plan
from cluster.cli.router import router
from cluster.cli.serve import serve
from cluster.cli.status import status
from cluster.cli.tokens import tokens
from cluster.cli.top import top
from cluster.cli.worker import worker

EPILOG = "Exit codes: 0 done, 1 it failed (the last line on stderr says why), 2 wrong usage, 130 interrupted."

app = typer.Typer(
    name="graphpool",
    help="Serves language models from a pool of workers, each at CUDA-Graph-replay speed.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SERVING, ASKING, STEERING, PREPARING = "Serving", "Asking", "Steering", "Before serving"

app.command(rich_help_panel=SERVING)(serve)
app.command(rich_help_panel=SERVING)(worker)
app.command(rich_help_panel=SERVING)(router)
app.command(rich_help_panel=ASKING)(chat)
app.command(rich_help_panel=ASKING)(generate)
app.command(rich_help_panel=ASKING)(status)
app.command(rich_help_panel=ASKING)(top)
app.command(rich_help_panel=STEERING)(drain)
app.command(rich_help_panel=PREPARING)(plan)
app.add_typer(doctor, rich_help_panel=PREPARING)
app.add_typer(certs, rich_help_panel=PREPARING)
app.add_typer(tokens, rich_help_panel=PREPARING)


def _version(wanted: bool) -> None:
    if wanted:
        from cluster.version import version

        typer.echo(f"graphpool {version()}")
        raise typer.Exit


@app.callback()
def common(
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, for a bug report.")
    ] = False,
) -> None:
    """Take what every command understands."""
    running.show_tracebacks = traceback
