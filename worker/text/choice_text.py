"""The text of one answer while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.text.stop_strings import StopStrings

REPLACEMENT = "\ufffd"
"""What decoders show for bytes that are not, or not yet, a character."""
MAX_HALF_CHARACTER = 3
"""Bytes of a UTF-8 character before its last one: at most so many replacements may still become a character."""
PROMPT_CONTEXT = 8
"""Prompt ids decoded in front of the answer's, for what depends on neighbours: spaces, halves of characters."""
KEPT_CONTEXT = 4
MAX_WINDOW = 24
"""Ids decoded again for every token; a longer window is cut back to KEPT_CONTEXT ids or a few more."""
MAX_RUN = 64
"""Ids decoded together at most."""
MAX_PENDING = 16
"""Ids without a whole character at their end before all but the last are taken for bytes that never become one."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to append, and the stop string that ended it, if any."""

    text: str
    stop_string: str | None = None


class ChoiceText:
    """Turns token ids into text piece by piece, never showing half a character nor the beginning of a stop string.

    `decode` turns ids into text; `prompt_token_ids` is what the answer continues, and never part of the text. The
    pieces join to what decoding everything at once gives. Work and memory for each token are bounded.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self._window = _Window(decode, prompt_token_ids)
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._stopped = False
        self.has_stops = bool(stop)
        """Whether a token may end the answer by its text."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text these tokens bring. After a stop string, and for the tokens after it, there is no more text.

        Many tokens at once cost little more than one, unless there are stop strings: those end at a certain token.
        """
        shown = []
        if not self.has_stops and not self._stopped:
            return TextDelta(self._window.push_all(token_ids))
        for token_id in token_ids:
            if self._stopped:
                break
            text, stop = self._stops.push(self._window.push(token_id))
            shown.append(text)
            if stop is not None:
                self._stopped = True
                return TextDelta("".join(shown), stop)
        return TextDelta("".join(shown))

    def finish(self) -> str:
        """What was held back, with a half character at the end as U+FFFD: the answer ends here, without a stop string.

        A stop string that only this text would complete does not count.
        """
        if self._stopped:
            return ""
        self._stopped = True
        text, stop = self._stops.push(self._window.finish())
        return text if stop is not None else text + self._stops.finish()


class _Window:
    """The last few ids, decoded together after each new one; what is new at the end of their text is shown."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_token_ids[-PROMPT_CONTEXT:])
        self._ends = [len(self._ids)]
        """Numbers of ids after which a whole character ended; those after the last one are pending."""
        self._settled = self._prompt_texts()
        """How the text of the ids that are not pending may read: several ways only if the prompt ends mid-character."""
        self._shown = ""
        """Text of the pending ids that was shown already."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(
            self._push_run(token_ids[start : start + MAX_RUN]) for start in range(0, len(token_ids), MAX_RUN)
        )

    def _push_run(self, token_ids: Sequence[int]) -> str:
        """Several ids by one decoding if whole characters end with them, else one by one."""
        if len(token_ids) > 1:
            ids = [*self._ids, *token_ids]
            text = self._decode(ids)
            known = self._known(text)
            if known is not None and not _half_character(text):
                self._ids = ids
                self._settle(text)
                return text[len(known) :]
        return "".join(self.push(token_id) for token_id in token_ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        half, known = _half_character(text), self._known(text)
        is_too_long = len(self._ids) - self._ends[-1] >= MAX_PENDING
        if known is None:
            # Some decoders show a whole run of bytes as replacements until its last character is complete.
            return "" if half and not is_too_long else self._start_over()
        new = text[len(known) : len(text) - half]
        if half and is_too_long:
            return self._split(text, known, new)
        if half:
            if new:
                self._settled = [known.removesuffix(self._shown)]
                self._shown += new
            return new
        self._settle(text)
        return new

    def finish(self) -> str:
        text = self._decode(self._ids)
        known = self._known(text)
        return self._start_over() if known is None else text[len(known) :]

    def _settle(self, text: str) -> None:
        """All of `text` is shown, and no id is pending."""
        self._settled, self._shown = [text], ""
        self._ends.append(len(self._ids))
        if len(self._ids) > MAX_WINDOW:
            self._cut()

    def _known(self, text: str) -> str | None:
        """The beginning of `text` that was shown or belongs to the prompt; None if it reads otherwise now."""
        candidates = (settled + self._shown for settled in self._settled)
        return next((known for known in candidates if text.startswith(known)), None)

    def _prompt_texts(self) -> list[str]:
        """The context's text, longest first, with and without what a next token could turn into a character."""
        whole = self._decode(self._ids) if self._ids else ""
        if not whole.endswith(REPLACEMENT):
            return [whole]
        cuts = range(1, min(MAX_HALF_CHARACTER, len(self._ids)) + 1)
        shorter = (self._decode(self._ids[:-cut]) for cut in cuts)
        return sorted({whole, whole.rstrip(REPLACEMENT), *shorter}, key=len, reverse=True)

    def _split(self, text: str, known: str, new: str) -> str:
        """Give up on pending ids that have become no character, but for the last few, which still may."""
        for kept in range(MAX_HALF_CHARACTER, -1, -1):
            border = len(self._ids) - kept
            head = self._decode(self._ids[:border])
            if head + self._decode(self._ids[border:]) == text:
                break
        shown = max(known + new, head, key=len)
        self._ids, self._ends = self._ids[border:], [0]
        self._settled, self._shown = [""], shown[len(head) :]
        return shown[len(known) :]

    def _start_over(self) -> str:
        """The pending ids' text by themselves: with their context they no longer read as it was shown."""
        self._ids = self._ids[self._ends[-1] :]
        text = self._decode(self._ids)
        new = text.removeprefix(self._shown)
        self._ends, self._settled, self._shown = [len(self._ids)], [text], ""
        return new

    def _cut(self) -> None:
        """Forget ids up to the end of some character, keeping a little context."""
        start = max((end for end in self._ends if end <= len(self._ids) - KEPT_CONTEXT), default=0)
        self._ids = self._ids[start:]
        self._ends = [end - start for end in self._ends if end >= start]
        self._settled = [self._decode(self._ids)]


def _half_character(text: str) -> int:
    """Replacements at the end that may be a character whose last bytes are still to come."""
    count = 0
    while count < MAX_HALF_CHARACTER and count < len(text) and text[-1 - count] == REPLACEMENT:
        count += 1
    return count
