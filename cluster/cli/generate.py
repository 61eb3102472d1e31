"""`graphpool generate`: continue a text or token ids."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import sampling
from cluster.cli import security_options as security
from cluster.cli.admission_options import Criticality, CriticalityName
from cluster.cli.json_answer import print_json
from cluster.cli.options import DEFAULT_ADDRESS, Addresses, AskedModel, TimeoutS, integers
from cluster.cli.running import one_sentence_errors

if TYPE_CHECKING:
    from cluster.client import AnswerStream


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from stdin.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="ID,...", help="Token ids to continue instead of a text.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object at the end: text, token ids, usage, timings, execution.")
    ] = False,
    address: Addresses = DEFAULT_ADDRESS,
    model: AskedModel = "",
    token_file: security.TokenFile = None,
    tls_ca: security.TlsCa = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    insecure: security.ClearToken = False,
    timeout_s: TimeoutS = None,
    criticality: Criticality = CriticalityName.CRITICAL,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    stop_token_ids: sampling.StopTokenIds = None,
    ignore_eos: sampling.IgnoreEos = False,
    min_tokens: sampling.MinTokens = None,
    presence_penalty: sampling.PresencePenalty = None,
    frequency_penalty: sampling.FrequencyPenalty = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    choices: sampling.NumChoices = None,
    logprobs: sampling.Logprobs = None,
) -> None:
    """Continue a prompt; the answer shows as it is made. With --token-ids, token ids show instead of text.

    The text is never parsed for control tokens, and no chat template is applied: see `chat` for that.
    """
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either a text or --token-ids")
    sampling.refuse_what_only_json_shows(as_json=as_json, choices=choices, logprobs=logprobs)
    options = sampling.sampling_values(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        n=choices,
        logprobs=logprobs,
    )
    source = integers(token_ids) if token_ids is not None else sys.stdin.read() if prompt == "-" else prompt or ""
    with one_sentence_errors():
        from cluster.client import GraphpoolClient

        config = security.client_config(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure
        )
        config = replace(config, criticality=criticality.value)
        with (
            GraphpoolClient(address, config) as client,
            client.stream(source, model=model, timeout_s=timeout_s, **options) as answer,
        ):
            if as_json:
                print_json(answer)
            else:
                _print_pieces(answer, as_ids=token_ids is not None)


def _print_pieces(answer: AnswerStream, *, as_ids: bool) -> None:
    from cluster.cli.terminal import write

    separator = ""
    for piece in answer:
        if not as_ids:
            write(piece.text)
        elif piece.token_ids:
            write(separator + ",".join(map(str, piece.token_ids)))
            separator = ","
    write("\n")
