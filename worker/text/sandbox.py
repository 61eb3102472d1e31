"""The sandbox that chat templates run in: no attributes of Python's own, and nothing without a limit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.text.budget import MAX_BITS, MAX_CHARS, MAX_ITEMS, TemplateLimit, current_budget

_WIDE_FORMAT = re.compile(r"\d{6}|\*")
_UNNEEDED_FILTERS = ("urlize", "wordwrap", "striptags", "xmlattr", "pprint", "random", "filesizeformat")
"""Whose time grows faster than their input, or which no chat needs."""
_TURNS, _SIZED = "turns of a loop", "sized"
"""Filters that a template cannot name."""


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """Counts loops, calls and text against the rendering's budget, and refuses what would be large before making it."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        for name in _UNNEEDED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded(one) for name, one in self.filters.items()}
        self.filters[_TURNS] = _turns
        self.filters[_SIZED] = _sized

    def compile_limited(self, source: str) -> jinja2.Template:
        """A template whose every loop and concatenation is counted."""
        tree = self.parse(source)
        for loop in tuple(tree.find_all(nodes.For)):
            chars = sum(len(part.data) for body in loop.body for part in _literals(body))
            loop.iter = nodes.Filter(loop.iter, _TURNS, [nodes.Const(chars)], [], None, None, lineno=loop.lineno)
        _wrap_concatenations(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See SandboxedEnvironment."""
        budget = current_budget()
        if budget is not None:
            budget.tick()
        _check_call(obj, args, kwargs)
        return _sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        _check_operands(operator, left, right)
        return _sized(super().call_binop(context, operator, left, right))


def _literals(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _wrap_concatenations(tree: nodes.Node) -> None:
    for parent in (tree, *tuple(tree.find_all(nodes.Node))):
        for name, value in parent.iter_fields():
            if isinstance(value, list):
                value[:] = [_checked(item) for item in value]
            else:
                setattr(parent, name, _checked(value))


def _checked(value: Any) -> Any:
    if not isinstance(value, nodes.Concat):
        return value
    return nodes.Filter(value, _SIZED, [], [], None, None, lineno=value.lineno)


def _written(value: Any) -> Any:
    """What is about to be written."""
    budget = current_budget()
    if budget is not None:
        text = value if isinstance(value, str) else str(value)
        budget.write(len(text))
        return text
    return value


@jinja2.pass_context  # so that it is not worked out while the template is compiled
def _turns(_: Context, items: Iterable[Any], literal_chars: int) -> Iterable[Any]:
    budget = current_budget()
    return items if budget is None else budget.turns(items, literal_chars)


def _sized(value: Any) -> Any:
    """The value, if it is of a size that may be."""
    if isinstance(value, str):
        _check(len(value) <= MAX_CHARS)
    elif isinstance(value, list | tuple | dict | set):
        _check(len(value) <= MAX_ITEMS)
    elif isinstance(value, int):
        _check(value.bit_length() <= MAX_BITS)
    return value


def _bounded(one: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers and results have limits."""

    @functools.wraps(one)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        if budget is not None:
            budget.tick()
        values = args[1:] if getattr(one, "jinja_pass_arg", None) else args
        _check_arguments(values[1:], kwargs)
        if one.__name__ in ("do_replace", "sync_do_join", "do_join", "do_format"):
            _check_text_filter(one.__name__, values, kwargs)
        return _sized(one(*args, **kwargs))

    return filtered


def _check_text_filter(name: str, values: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name == "do_format":
        _check_format(values[0])
    elif name == "do_replace":
        old, new = (*values[1:], kwargs.get("old", ""), kwargs.get("new", ""))[:2]
        _check_replace(str(values[0]), str(old), str(new))
    elif isinstance(values[0], list | tuple):
        _check_join(str(values[1] if len(values) > 1 else kwargs.get("d", "")), values[0])


def _check_call(obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    obj = getattr(obj, "__wrapped__", obj)  # the sandbox puts a function of its own around str.format
    owner = getattr(obj, "__self__", None)
    _check_arguments(args, kwargs)
    if not isinstance(owner, str):
        return
    name = getattr(obj, "__name__", "")
    if name in ("format", "format_map"):
        _check_format(owner)
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_join(owner, args[0])


def _check_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        _check(not isinstance(value, int) or abs(value) <= MAX_ITEMS)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                _check(len(one) * max(other, 0) <= (MAX_CHARS if isinstance(one, str) else MAX_ITEMS))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check(left.bit_length() * max(right, 0) <= MAX_BITS)
    elif operator == "%":
        _check_format(left)


def _check_format(text: Any) -> None:
    _check(not isinstance(text, str) or _WIDE_FORMAT.search(text) is None)


def _check_replace(text: str, old: str, new: str) -> None:
    _check(len(text) + (text.count(old)) * len(new) <= MAX_CHARS)


def _check_join(separator: str, items: list[Any] | tuple[Any, ...]) -> None:
    total = sum(len(item) if isinstance(item, str) else 32 for item in items)
    _check(total + len(separator) * len(items) <= MAX_CHARS)


def _check(is_small: bool) -> None:
    if not is_small:
        raise TemplateLimit("the chat template makes something too large")
