"""S8: a chat template is a program of somebody else's, and gets neither Python nor the whole machine."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from tests.fakes.tokenizers import CHATML
from worker.errors import InvalidRequest, ModelLoadError
from worker.text.template import ChatTemplate

CHAT = [{"role": "user", "content": "a secret"}]
HUGE = 1_000_000_000


def render(source: str, **options: float) -> str:
    return ChatTemplate(source, {}, **options).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__dict__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('%s'|format('x')).__class__ }}",
        "{% set x = messages.append(1) %}{{ messages|length }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_s8_nothing_of_python_can_be_reached(source: str) -> None:
    try:
        written = render(source)
    except (InvalidRequest, ModelLoadError):
        return
    for sign in ("class", "function", "module", "root:", "uid=", "0x", "2"):
        assert sign not in written, written


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in [1,2,3,4,5,6,7,8,9,0] %}" * 9 + "{% endfor %}" * 9,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in range(100000) if m is odd %}{% for n in range(100000) if n < 0 %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='') %}{% for a in range(100000) %}{% set ns.x = ns.x ~ 'abcdefghij' %}"
        "{% if ns.x.count('a') %}{% endif %}{% endfor %}",
    ],
)
def test_s8_loops_without_an_end_are_ended(source: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"the chat template (takes too long|makes something too large)"):
        render(source, max_seconds=0.3)
    assert time.monotonic() - started_s < 3


@pytest.mark.parametrize(
    "source",
    [
        f"{{{{ 'a' * {HUGE} }}}}",
        f"{{{{ {HUGE} * 'a' }}}}",
        f"{{{{ [1] * {HUGE} }}}}",
        "{{ 9 ** (9 ** 9) }}",
        f"{{{{ 'a'|center({HUGE}) }}}}",
        f"{{{{ 'a'.ljust({HUGE}) }}}}",
        f"{{{{ 'a\\nb'|indent({HUGE}) }}}}",
        f"{{{{ '%{HUGE}d' % 1 }}}}",
        f"{{{{ '%{HUGE}d'|format(1) }}}}",
        f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
        f"{{{{ '{{:{HUGE}}}'.format(1) }}}}",
        f"{{{{ [1]|batch({HUGE}, 'x')|list }}}}",
        "{% set a = 'x' * 2000000 %}{{ a.replace('x', a) }}",
        "{% set a = 'x' * 2000000 %}{{ a|replace('x', a) }}",
        "{% set a = 'x' * 2000000 %}{{ ([a] * 1000)|join }}",
        "{% set a = 'x' * 2000000 %}{{ a.join(['y'] * 1000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
        "{% for i in range(100000) %}" + "text " * 1000 + "{% endfor %}",
        "{% macro f() %}{% for i in range(100000) %}" + "text " * 1000 + "{% endfor %}{% endmacro %}{{ f() }}",
    ],
)
def test_s8_what_would_be_large_is_refused_before_it_is_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequest, ModelLoadError), match="the chat template") as caught:
            render(source)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 << 20
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_s8_a_template_that_is_itself_too_long_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="the limit is"):
        render("x" * (1 << 20) + "y")


def test_s8_the_limits_leave_real_chats_alone() -> None:
    chat = [{"role": "user" if turn % 2 == 0 else "assistant", "content": "word " * 100} for turn in range(2000)]
    template = ChatTemplate(CHATML, {})
    started_s = time.monotonic()
    assert template.render(chat).count("<|im_start|>") == 2001
    assert time.monotonic() - started_s < 5


def test_s8_loop_variables_work_as_before() -> None:
    source = (
        "{% for m in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}"
        "{{ loop.previtem }}{{ loop.nextitem }} {% else %}none{% endfor %}"
    )
    assert render(source) == "1/32 2/313 3/3!2 "
    assert render("{% for x in [] %}{% else %}none{% endfor %}") == "none"
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}") == "a1"
    assert render("{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}") == "123"
    assert render("{% for x in missing %}{% endfor %}ok") == "ok"
    assert render("{{ 'a' ~ 1 ~ none }}{{ [1, 2]|join('-') }}{{ 'aXb'.replace('X', '-') }}") == "a1None1-2a-b"
