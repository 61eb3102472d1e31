"""`graphpool chat`: one answer, or a conversation."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import sampling
from cluster.cli import security_options as security
from cluster.cli.admission_options import Criticality, CriticalityName
from cluster.cli.json_answer import print_json
from cluster.cli.options import DEFAULT_ADDRESS, Addresses, AskedModel, TimeoutS
from cluster.cli.running import one_sentence_errors

if TYPE_CHECKING:
    from cluster.client import AnswerStream, GraphpoolClient
    from protos.control_pb2 import ModelInfo

MODEL_TIMEOUT_S = 10.0
HELP = "/new starts over, /quit ends (so does Ctrl-D), /help says this; Ctrl-C ends an answer."
ENDS, HELPS = ("/quit", "/exit", "/bye"), ("/help", "/?")


def chat(
    message: Annotated[
        str | None, typer.Argument(help="Answer this and end; - reads it from stdin. Without it: a conversation.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object at the end: text, token ids, usage, timings, execution.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
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
    """Talk with the model: with a message, one answer; without, a conversation that remembers.

    The answer shows as it is made.
    """
    if as_json and message is None:
        raise typer.BadParameter("--json is for a single message")
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
    with one_sentence_errors():
        from cluster.client import GraphpoolClient

        config = security.client_config(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure
        )
        config = replace(config, criticality=criticality.value)
        with GraphpoolClient(address, config) as client:
            conversation = Conversation(client, system, timeout_s, {"model": model, **options})
            if message is None:
                _talk(conversation)
            else:
                conversation.say(sys.stdin.read() if message == "-" else message, as_json=as_json)


class Conversation:
    """Remembers what was said; an answer that was not finished is forgotten together with its question."""

    def __init__(
        self, client: GraphpoolClient, system: str | None, timeout_s: float | None, options: dict[str, Any]
    ) -> None:
        self._client = client
        self._beginning = [] if system is None else [("system", system)]
        self._timeout_s = timeout_s
        self._options = options
        self._messages = list(self._beginning)

    def model(self) -> ModelInfo:
        """What is talked with; also finds out early when nothing answers."""
        return self._client.model_info(self._options["model"], timeout_s=MODEL_TIMEOUT_S)

    def begin_again(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._beginning)

    def say(self, text: str, *, as_json: bool = False) -> None:
        """Send a message and show the answer, as it comes or as one JSON object."""
        messages = [*self._messages, ("user", text)]
        with self._client.chat_stream(messages, timeout_s=self._timeout_s, **self._options) as answer:
            said = print_json(answer) if as_json else _show(answer)
        self._messages = [*messages, ("assistant", said)]


def _show(answer: AnswerStream) -> str:
    from cluster.cli.terminal import write

    parts: list[str] = []
    try:
        for piece in answer:
            parts.append(piece.text)
            write(piece.text)
    finally:
        if parts:
            write("\n")
    return "".join(parts)


def _talk(conversation: Conversation) -> None:
    from cluster.client import CallError

    info = conversation.model()
    if sys.stdin.isatty():
        # Gives the prompt a history and keys that move in the line, where Python was built with it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    typer.secho(f"{info.name} on {info.device}. {HELP}", err=True, dim=True)
    while (text := _ask()) is not None:
        if text == "/new":
            conversation.begin_again()
        elif text in ENDS:
            return
        elif text in HELPS:
            typer.secho(HELP, err=True, dim=True)
        elif text:
            try:
                conversation.say(text)
            except KeyboardInterrupt:
                typer.secho("(ended)", err=True, dim=True)
            except CallError as error:
                from cluster.cli.running import sentence

                typer.secho(sentence(error), err=True, fg=typer.colors.RED)


def _ask() -> str | None:
    """A line from the person; None at the end of input, or when Ctrl-C is pressed on an empty prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None
