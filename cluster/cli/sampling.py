"""The sampling options of `chat` and `generate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cluster.cli.options import SAMPLING, integers


def _option(help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=SAMPLING, **settings)


MaxTokens = Annotated[
    int | None, _option("Tokens to generate at most. Default: what the context leaves.", "--max-tokens", "-n")
]
Temperature = Annotated[float | None, _option("0 is greedy.", "--temperature", "-t")]
TopP = Annotated[float | None, _option("Keep the likeliest tokens that together reach this probability.")]
TopK = Annotated[int | None, _option("Keep this many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, _option("Drop tokens less likely than this fraction of the likeliest.")]
Seed = Annotated[int | None, _option("The same seed gives the same answer. Default: drawn by the server.")]
Stop = Annotated[list[str] | None, _option("A string that ends the answer; may be given several times.")]
StopTokenIds = Annotated[str | None, _option("Token ids that end the answer.", metavar="ID,...")]
IgnoreEos = Annotated[bool, _option("Go on past the model's end-of-sequence tokens.", "--ignore-eos")]
MinTokens = Annotated[int | None, _option("No end before this many tokens.")]
PresencePenalty = Annotated[float | None, _option("-2 to 2: against tokens that occurred.")]
FrequencyPenalty = Annotated[float | None, _option("-2 to 2: against tokens, for each time they occurred.")]
RepetitionPenalty = Annotated[float | None, _option("Over 1: against tokens of prompt and answer.")]

NumChoices = Annotated[
    int | None, _option("Answers to make of the one prompt; with --json, which shows all of them.", "--choices")
]
Logprobs = Annotated[
    int | None, _option("Log-probability of each token, and this many likeliest in its place; with --json.")
]


def refuse_what_only_json_shows(*, as_json: bool, choices: int | None, logprobs: int | None) -> None:
    """Raise BadParameter for options whose effect would be computed and never seen."""
    if not as_json and (choices, logprobs) != (None, None):
        raise typer.BadParameter("--choices and --logprobs show with --json alone")


def sampling_values(
    *, stop: list[str] | None, stop_token_ids: str | None, ignore_eos: bool, **scalars: Any
) -> dict[str, Any]:
    """Keyword arguments for a client. What was not given stays absent, so the model's own defaults hold."""
    return {
        **scalars,
        "stop": tuple(stop or ()),
        "stop_token_ids": () if stop_token_ids is None else tuple(integers(stop_token_ids)),
        "ignore_eos": True if ignore_eos else None,
    }
