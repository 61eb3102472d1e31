"""An answer as one line of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from cluster.client import AnswerStream


def print_json(answer: AnswerStream) -> str:
    """Print it when it is whole; returns the text of its first choice."""
    from cluster.cli.answer_values import answer_values

    values = answer_values(list(answer))
    typer.echo(json.dumps(values, ensure_ascii=False))
    return str(values["text"])
