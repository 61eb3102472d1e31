"""What one rendering of a chat template may take: time, loops, text. A template is a program that came with a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_SECONDS = 1.0
MAX_CHARS = 4 << 20
"""Of what is written, and of any string on the way."""
MAX_LITERAL_CHARS = 64 << 20
"""Of the template's own text in loops, which counts whole for each turn, whatever branch is taken."""
MAX_ITEMS = 1 << 20
"""Of a list, and the largest number that may size anything."""
MAX_BITS = 4096
"""Of a number."""
TICKS_PER_LOOK = 256


class TemplateLimit(jinja2.TemplateError):
    """A template wanted more than it may have; the message is ours and quotes nothing."""


class Budget:
    """Of one rendering. Raises TemplateLimit as soon as something is used up."""

    def __init__(self, max_seconds: float = MAX_SECONDS, max_chars: int = MAX_CHARS) -> None:
        self._deadline_s = time.monotonic() + max_seconds
        self._max_chars = max_chars
        self._num_chars = 0
        self._literal_chars = 0
        self._ticks = 0

    def tick(self) -> None:
        """A turn of a loop, or a call."""
        self._ticks += 1
        if self._ticks % TICKS_PER_LOOK == 0:
            self.check_time()

    def check_time(self) -> None:
        """Whether there is time left."""
        if time.monotonic() > self._deadline_s:
            raise TemplateLimit("the chat template takes too long")

    def write(self, num_chars: int) -> None:
        """So much was written."""
        self._num_chars += num_chars
        if self._num_chars > self._max_chars:
            raise TemplateLimit("the chat template writes too much")

    def turns(self, items: Iterable[Any], literal_chars: int) -> Iterator[Any]:
        """The same items, each of them a turn of a loop whose body holds so much of the template's own text."""
        for item in items:
            self.tick()
            self._literal_chars += literal_chars
            if self._literal_chars > MAX_LITERAL_CHARS:
                raise TemplateLimit("the chat template writes too much")
            yield item


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def current_budget() -> Budget | None:
    """Of the rendering under way; None while a template is compiled."""
    return _budget.get()


class within:  # noqa: N801  # reads as what it is: `with within(Budget()):`
    """A context manager: everything inside is paid from this budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._token = _budget.set(self._budget)

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)
