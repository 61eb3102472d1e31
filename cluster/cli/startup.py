"""How a starting service shows what it is at: a line for each finished phase, a spinner for the current one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class StartupLines:
    """A StartProgress on a terminal. Without one, plain lines; each carries the seconds since the start."""

    def __init__(self, console: Console | None = None) -> None:
        # A log is read with `| tee` and in editors: only a terminal is told how wide it is.
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._started_s = time.monotonic()
        self._status: Status | None = None
        self._shown = ""

    def __enter__(self) -> Self:
        """Begin; phases show from now on."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Stop the spinner, whatever happened."""
        self._stop_spinner()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def doing(self, what: str) -> None:
        """Show that `what` has begun."""
        if not self._console.is_terminal:
            if what != self._shown:
                self._console.print(f"  {self.elapsed_s:6.1f} s  {what} ...", markup=False)
        elif self._status is None:
            self._status = self._console.status(escape(what))
            self._status.start()
        else:
            self._status.update(escape(what))
        self._shown = what

    def done(self, what: str) -> None:
        """Show that `what`, in console markup, is finished."""
        self._stop_spinner()
        self._console.print(f"  [green]{self.elapsed_s:6.1f} s[/]  {what}")

    def say(self, text: str = "") -> None:
        """A line of its own, in console markup."""
        self._stop_spinner()
        self._console.print(text)

    def model_progress(self, what: str, done: int, total: int) -> None:
        """A worker's Progress: what is being loaded, and how far it is; from any thread."""
        if self._console.is_terminal or what != self._shown:
            percent = f" {100 * done // total} %" if total and self._console.is_terminal else ""
            self.doing(f"{what}{percent}")
            self._shown = what

    def _stop_spinner(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
