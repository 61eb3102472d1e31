"""What a service that is ready suggests can be typed, and answered by the model it serves."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main
from rich.text import Text

from cluster.cli.app import app
from cluster.cli.first_words import suggestion
from cluster.cli.router import joining
from cluster.security.config import SecurityConfig


@pytest.mark.parametrize(
    ("has_tokenizer", "has_chat_template", "command"),
    [(True, True, "chat"), (True, False, "generate"), (False, False, "generate")],
)
def test_what_is_suggested_can_be_typed(has_tokenizer: bool, has_chat_template: bool, command: str) -> None:
    lines = suggestion("127.0.0.1:1", has_tokenizer=has_tokenizer, has_chat_template=has_chat_template)
    (line,) = [line for line in lines if "try:" in line]
    words = shlex.split(re.sub(r"^ *try: *", "", line))
    assert words[:2] == ["graphpool", command]
    assert ("--token-ids" in words) is not has_tokenizer
    with typer.main.get_group(app).commands[command].make_context(command, words[2:]) as context:
        assert context.params["address"] == "127.0.0.1:1"


def test_what_the_model_lacks_is_said() -> None:
    assert (
        "no tokenizer.json"
        in Text.from_markup(suggestion("a:1", has_tokenizer=False, has_chat_template=False)[0]).plain
    )
    assert (
        "no chat template" in Text.from_markup(suggestion("a:1", has_tokenizer=True, has_chat_template=False)[0]).plain
    )
    assert len(suggestion("a:1", has_tokenizer=True, has_chat_template=True)) == 1


@pytest.mark.parametrize(
    ("address", "security", "line"),
    [
        ("127.0.0.1:50050", SecurityConfig(), "graphpool worker --port 0 --announce 127.0.0.1:50050"),
        (
            "0.0.0.0:50050",
            SecurityConfig(tls_cert="c", tls_key="k", tls_ca="a"),
            "graphpool worker with --announce THIS-HOST:50050, a --host that the router reaches and --tls-cert, --tls-key, "
            "--tls-ca of the same CA",
        ),
        (
            "10.0.0.5:50050",
            SecurityConfig(),
            "graphpool worker with --announce 10.0.0.5:50050, a --host that the router reaches",
        ),
    ],
)
def test_a_router_says_how_replicas_join_it_from_where_they_are(
    address: str, security: SecurityConfig, line: str
) -> None:
    assert joining(address, security) == line
