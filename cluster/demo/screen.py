"""Answers that grow while one looks: panels on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.cli.terminal import printable
from cluster.demo.watched import WatchedChat

COLOURS = ("cyan", "magenta", "yellow")
LINE = 60
"""Characters of an answer that make a line where there is no terminal."""


class ChatScreen:
    """Shows some chats side by side in time. Call `update` whenever one of them has grown."""

    def __init__(self, console: Console, chats: Sequence[WatchedChat]) -> None:
        self._console = console
        self._chats = chats
        self._shown = [0] * len(chats)
        self._live = Live(console=console, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Show what is left and let go of the terminal."""
        if self._live is not None:
            self._live.update(self._panels(), refresh=True)
            self._live.stop()
        else:
            for index in range(len(self._chats)):
                self._print_lines(index, is_last=True)

    def update(self, chat: WatchedChat) -> None:
        """A piece has come."""
        if self._live is not None:
            self._live.update(self._panels())
        else:
            self._print_lines(self._chats.index(chat), is_last=False)

    def _panels(self) -> Group:
        panels = []
        for chat, colour in zip(self._chats, COLOURS, strict=False):
            note = f"{len(chat.token_ids)} tokens" + (" · ended" if chat.is_over else "")
            panels.append(
                Panel(
                    Text(printable(chat.text)),
                    title=chat.question,
                    subtitle=note,
                    border_style=colour,
                    title_align="left",
                )
            )
        return Group(*panels)

    def _print_lines(self, index: int, *, is_last: bool) -> None:
        for line, end in whole_lines(self._chats[index].text, self._shown[index], is_last=is_last):
            self._shown[index] = end
            self._console.print(f"  chat {index + 1} | {line}", markup=False, highlight=False)


def whole_lines(text: str, start: int, *, is_last: bool) -> Iterator[tuple[str, int]]:
    """Lines of about LINE characters that are complete from `start` on, each with where it ends in `text`."""
    while len(text) - start >= LINE or (is_last and len(text) > start):
        end = len(text) if len(text) - start < LINE else text.rfind(" ", start + 1, start + LINE) + 1 or start + LINE
        yield " ".join(printable(text[start:end].replace("\n", " ")).split()), end
        start = end


def chat_table(chats: Sequence[WatchedChat]) -> Table:
    """How each answer was computed and how fast it came."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("chat")
    table.add_column("replica")
    for title in ("tier", "bucket", "tokens", "first token", "tokens/s"):
        table.add_column(title, justify="right")
    for number, chat in enumerate(chats, 1):
        execution = chat.execution
        table.add_row(
            str(number),
            execution.replica if execution else "-",
            str(execution.tier) if execution else "-",
            f"{execution.bucket} ({execution.runner})" if execution else "-",
            str(len(chat.token_ids)),
            f"{chat.first_token_ms:.0f} ms",
            f"{chat.tokens_per_s:.1f}",
        )
    return table
