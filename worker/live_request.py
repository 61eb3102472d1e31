"""A request inside the engine: its choices, and the text each has so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from worker.batch import Batch
from worker.chooser import StepOutput
from worker.errors import InvalidRequest
from worker.request import ChoiceDelta, FinishReason, GenerateRequest
from worker.sequence import Sequence, SequenceState
from worker.text.choice_text import ChoiceText

Decode = Callable[[Items[int], bool], str]
"""(token ids, skip special tokens) -> text."""


@dataclass(slots=True)
class Choice:
    """One sequence and its text; `text` is None when the model has no tokenizer."""

    sequence: Sequence
    text: ChoiceText | None


class LiveRequest:
    """Everything the engine keeps for one request until all its choices have ended."""

    def __init__(self, request: GenerateRequest, max_model_len: int, now_s: float, decode: Decode | None) -> None:
        self.request = request
        params = request.sampling
        room = max_model_len - len(request.prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        self.choices = [
            Choice(
                Sequence(request=request, index=index, max_tokens=max_tokens, arrival_s=now_s),
                None if decode is None else _choice_text(request, decode),
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
    def unfinished(self) -> list[Sequence]:
        """The choices that have not ended."""
        sequences = [choice.sequence for choice in self.choices]
        return [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]

    def restore(self, *, eos_token_ids: Items[int], now_s: float) -> list[ChoiceDelta]:
        """Take what was generated elsewhere as if steps had brought it, silently.

        Returns the ends of choices that it completes: their text was delivered with their last token. Raises
        InvalidRequest when something follows the token that ends a choice.
        """
        open_choices = [self.choices[sequence.index] for sequence in self.unfinished if sequence.num_generated]
        restored = [self._restore(choice, eos_token_ids, now_s) for choice in open_choices]
        return [delta for delta in restored if delta is not None]

    def advance(
        self,
        sequence: Sequence,
        batch: Batch,
        output: StepOutput,
        row: int,
        *,
        eos_token_ids: Items[int],
        now_s: float,
    ) -> ChoiceDelta:
        """Append the token of `row` of a step to `sequence`, decide whether it ends, and say what is new."""
        choice, token_id = self.choices[sequence.index], output.token_ids[row]
        logprob = output.logprobs[row]
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        sequence.token_ids.append(token_id)
        stop_token_id = self._stop_token(sequence.num_generated, token_id, eos_token_ids)
        text, stop_string = self._text(choice, token_id, is_stop=stop_token_id is not None)
        sequence.finish_reason = _finish_reason(sequence, stop_token_id, stop_string)
        if sequence.finish_reason is not None and stop_string is None and choice.text is not None:
            text += choice.text.finish()
        return ChoiceDelta(
            request_id=self.request.request_id,
            index=sequence.index,
            token_ids=(token_id,),
            text=text,
            logprobs=() if logprob is None else (logprob,),
            finish_reason=sequence.finish_reason,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached_tokens,
            tier=batch.tier,
            bucket=batch.bucket,
            runner=output.runner,
            timings=None if sequence.finish_reason is None else sequence.timings(now_s),
        )

    def _restore(self, choice: Choice, eos_token_ids: Items[int], now_s: float) -> ChoiceDelta | None:
        sequence = choice.sequence
        *before, last = sequence.generated
        stops_early = any(
            self._stop_token(count, token, eos_token_ids) is not None for count, token in _counted(before)
        )
        if not stops_early and choice.text is not None:
            stops_early = choice.text.push(before).stop_string is not None
        if stops_early:
            raise InvalidRequest("delivered", f"choice {sequence.index} goes on after its end")
        stop_token_id = self._stop_token(sequence.num_generated, last, eos_token_ids)
        _, stop_string = self._text(choice, last, is_stop=stop_token_id is not None)
        sequence.finish_reason = _finish_reason(sequence, stop_token_id, stop_string)
        if sequence.finish_reason is None:
            return None
        sequence.state = SequenceState.FINISHED
        return ChoiceDelta(
            request_id=self.request.request_id,
            index=sequence.index,
            finish_reason=sequence.finish_reason,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
            prompt_tokens=sequence.num_prompt,
            timings=sequence.timings(now_s),
        )

    def _stop_token(self, num_generated: int, token_id: int, eos_token_ids: Items[int]) -> int | None:
        """`token_id` if it ends the answer as its `num_generated`-th token."""
        params = self.request.sampling
        if num_generated <= params.min_tokens:
            return None
        stops = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
        return token_id if stops else None

    @staticmethod
    def _text(choice: Choice, token_id: int, *, is_stop: bool) -> tuple[str, str | None]:
        """The text one token brings, and the stop string it completes. A stop token has no text of its own."""
        if choice.text is None or is_stop:
            return "", None
        delta = choice.text.push([token_id])
        return delta.text, delta.stop_string


def _finish_reason(sequence: Sequence, stop_token_id: int | None, stop_string: str | None) -> FinishReason | None:
    if stop_token_id is not None or stop_string is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_generated >= sequence.max_tokens else None


def _counted(token_ids: Items[int]) -> Iterable[tuple[int, int]]:
    """Each token with the number of those up to it."""
    return enumerate(token_ids, 1)


def _choice_text(request: GenerateRequest, decode: Decode) -> ChoiceText:
    params = request.sampling
    return ChoiceText(
        lambda ids: decode(ids, params.skip_special_tokens),
        request.prompt_token_ids,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
    )
