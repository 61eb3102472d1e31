"""Chat templates, run in a sandbox, with the helpers that model authors expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from worker.errors import InvalidRequest, ModelLoadError
from worker.text.budget import MAX_SECONDS, Budget, TemplateLimit, within
from worker.text.sandbox import LimitedSandbox

MAX_ERROR_CHARS = 300
MAX_SOURCE_CHARS = 1 << 20


class ChatTemplate:
    """A compiled chat template. Raises ModelLoadError for one that does not compile.

    A rendering that takes longer than `max_seconds`, or makes something too large, is refused.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, max_seconds: float = MAX_SECONDS) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelLoadError(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE_CHARS}")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_seconds = max_seconds
        try:
            self._template = _environment().compile_limited(source)
        except (jinja2.TemplateError, RecursionError, OverflowError, MemoryError) as error:
            raise ModelLoadError(f"the chat template does not compile: {error}") from error

    def _told(self, error: jinja2.TemplateError) -> str:
        """The template's own words; what it puts together may quote a client."""
        if isinstance(error, TemplateLimit):
            return str(error.message)
        message = error.message
        if message and message in self.source:
            return message[:MAX_ERROR_CHARS]
        return f"the chat template refuses them ({type(error).__name__})"

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the next answer to these messages. Raises InvalidRequest with the template's own message."""
        budget = Budget(self._max_seconds)
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        try:
            with within(budget):
                text = self._template.render(values)
                budget.check_time()
                return text
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", self._told(error)) from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise InvalidRequest("messages", f"the chat template failed with {type(error).__name__}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> LimitedSandbox:
    environment = LimitedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
