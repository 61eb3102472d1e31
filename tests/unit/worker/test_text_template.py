from __future__ import annotations

import datetime
from typing import Any

import pytest

from worker.errors import InvalidRequest, ModelLoadError
from worker.text.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = CHAT, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages)


def test_helpers_that_templates_expect_are_there() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1, 2] | tojson(indent=2) }}") == "[\n  1,\n  2\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().astimezone().year)
    assert render("{{ bos_token }}{{ eos_token }}", bos_token="<s>") == "<s>"
    assert render("{{ tools is none }} {{ add_generation_prompt }}") == "True True"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}") == "2"


def test_blocks_leave_no_blank_lines() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n") == "Hi\n"
    )


def test_the_templates_own_message_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('Conversation roles must alternate user/assistant/...') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.strip() }}",
        "{{ missing.attribute }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_the_requests_fault_and_shows_no_text(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source, [{"role": "user", "content": "a secret"}])
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ strftime_now.__globals__['datetime'].__name__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_a_template_that_does_not_compile_is_a_problem_of_the_model() -> None:
    with pytest.raises(ModelLoadError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_long_messages_of_templates_are_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('" + "x" * 5000 + "') }}")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no: ' + messages[0].content) }}",
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages[0][messages[0].content].more }}",
    ],
)
def test_a_template_cannot_quote_a_message_in_its_error(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match="the chat template refuses them") as caught:
        template.render([{"role": "user", "content": "a private word"}])
    assert "private" not in str(caught.value)
