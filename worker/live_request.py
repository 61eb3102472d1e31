"""A request inside the engine: its choices, and what each has that was not handed out yet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from worker.errors import InvalidRequest
from worker.request import ChoiceDelta, FinishReason, GenerateRequest, Logprob
from worker.sequence import Sequence, SequenceState
from worker.text.choice_text import ChoiceText

Decode = Callable[[Items[int], bool], str]
"""(token ids, skip special tokens) -> text."""


class Choice:
    """One sequence, and what of its answer is still to be handed out.

    Taking a token is cheap, for it happens for every row of every step; what it brings is put together when it is
    handed out, for many tokens at once. Only stop strings need the text of each token as it comes.
    """

    __slots__ = (
        "_decides_by_text",
        "_last_length",
        "_logprobs",
        "_min_length",
        "_num_sent",
        "_pending_text",
        "_stop_ids",
        "_text",
        "due_s",
        "sequence",
        "stop_string",
        "stop_token_id",
    )

    def __init__(self, sequence: Sequence, text: ChoiceText | None, eos_token_ids: Items[int]) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None
        self.due_s = 0.0
        """When what it has should be handed out at the latest."""
        self._text = text
        """None when the model has no tokenizer."""
        self._decides_by_text = text is not None and text.has_stops
        self._stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self._min_length = sequence.num_prompt + params.min_tokens
        self._last_length = sequence.num_prompt + sequence.max_tokens
        self._num_sent = len(sequence.token_ids)
        self._pending_text = ""
        self._logprobs: list[Logprob] = []

    @property
    def num_unsent(self) -> int:
        """Tokens that were not handed out."""
        return len(self.sequence.token_ids) - self._num_sent

    def take(self, token_id: int, logprob: Logprob | None) -> bool:
        """Append a token; whether the answer ends with it."""
        sequence = self.sequence
        sequence.token_ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._ends_with(token_id)

    def restore(self) -> bool:
        """Take what was generated elsewhere as if steps had brought it, silently; whether the answer ends with it.

        Raises InvalidRequest when something follows the token that ends it.
        """
        sequence = self.sequence
        *before, last = sequence.generated
        stops_early = any(
            token_id in self._stop_ids for token_id in before[max(self._min_length - sequence.num_prompt, 0) :]
        )
        if not stops_early and self._text is not None:
            stops_early = self._text.push(before).stop_string is not None
        if stops_early:
            raise InvalidRequest("delivered", f"choice {sequence.index} goes on after its end")
        has_ended = self._ends_with(last)
        self._pending_text = ""  # it was delivered with its token
        if has_ended:
            sequence.state = SequenceState.FINISHED
            self._text = None
        elif self._text is not None and not self._decides_by_text:
            self._text.push((last,))
        return has_ended

    def _ends_with(self, token_id: int) -> bool:
        """Whether the token, the last so far, ends the answer; if so the sequence is told why."""
        sequence = self.sequence
        if token_id in self._stop_ids and len(sequence.token_ids) > self._min_length:
            self.stop_token_id = token_id
            sequence.finish_reason = FinishReason.STOP
            return True
        if self._decides_by_text and self._push(token_id):
            sequence.finish_reason = FinishReason.STOP
            return True
        if len(sequence.token_ids) >= self._last_length:
            sequence.finish_reason = FinishReason.LENGTH
            return True
        return False

    def delta(self, *, tier: int, bucket: int, runner: str, now_s: float) -> ChoiceDelta:
        """Everything that was not handed out; it counts as handed out from here on."""
        sequence = self.sequence
        token_ids = tuple(sequence.token_ids[self._num_sent :])
        logprobs = tuple(self._logprobs)
        self._num_sent = len(sequence.token_ids)
        self._logprobs.clear()
        has_ended = sequence.finish_reason is not None
        return ChoiceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            text=self._take_text(token_ids),
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_string=self.stop_string,
            stop_token_id=self.stop_token_id,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached_tokens,
            tier=tier,
            bucket=bucket,
            runner=runner,
            timings=sequence.timings(now_s) if has_ended else None,
        )

    def rest(self) -> ChoiceDelta:
        """What was held back of an answer that ends with an error: text that is whole, of no step in particular."""
        return self.delta(tier=0, bucket=0, runner="", now_s=0.0)

    def _push(self, token_id: int) -> bool:
        """Whether the text of a token completes a stop string."""
        assert self._text is not None
        delta = self._text.push((token_id,))
        self._pending_text += delta.text
        self.stop_string = delta.stop_string
        return delta.stop_string is not None

    def _take_text(self, token_ids: tuple[int, ...]) -> str:
        """The text of the tokens handed out; a stop token has none of its own."""
        if self._text is None:
            return ""
        text, self._pending_text = self._pending_text, ""
        if not self._decides_by_text:
            text = self._text.push(token_ids if self.stop_token_id is None else token_ids[:-1]).text
        if self.sequence.finish_reason is not None and self.stop_string is None:
            text += self._text.finish()
        return text


class LiveRequest:
    """Everything the engine keeps for one request until all its choices have ended."""

    def __init__(
        self,
        request: GenerateRequest,
        max_model_len: int,
        now_s: float,
        decode: Decode | None,
        eos_token_ids: Items[int],
    ) -> None:
        self.request = request
        params = request.sampling
        room = max_model_len - len(request.prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        self.choices = [
            Choice(
                Sequence(request=request, index=index, max_tokens=max_tokens, arrival_s=now_s),
                None if decode is None else _choice_text(request, decode),
                eos_token_ids,
            )
            for index in range(params.n)
        ]

        for index in request.finished:
            self.choices[index].sequence.state = SequenceState.FINISHED

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.sequence.state is SequenceState.FINISHED for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        """The choices that have not ended."""
        return [choice for choice in self.choices if choice.sequence.state is not SequenceState.FINISHED]

    def restore(self, now_s: float) -> list[ChoiceDelta]:
        """Take what was generated elsewhere. Returns the ends of choices that it completes, without text or tokens.

        Raises InvalidRequest when something follows the token that ends a choice.
        """
        return [
            choice.delta(tier=0, bucket=0, runner="", now_s=now_s)
            for choice in self.unfinished
            if choice.sequence.num_generated and choice.restore()
        ]


def _choice_text(request: GenerateRequest, decode: Decode) -> ChoiceText:
    params = request.sampling
    return ChoiceText(
        lambda ids: decode(ids, params.skip_special_tokens),
        request.prompt_token_ids,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
    )
