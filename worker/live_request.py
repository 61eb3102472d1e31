"""A request inside the engine: its choices, and the text each has so far."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from worker.batch import Batch
from worker.chooser import StepOutput
from worker.request import ChoiceDelta, FinishReason, GenerateRequest
from worker.sequence import Sequence
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

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        return all(choice.sequence.finish_reason is not None for choice in self.choices)

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
        stop_token_id = self._stop_token(sequence, token_id, eos_token_ids)
        text, stop_string = self._text(choice, token_id, is_stop=stop_token_id is not None)
        if stop_token_id is not None or stop_string is not None:
            sequence.finish_reason = FinishReason.STOP
        elif sequence.num_generated >= sequence.max_tokens:
            sequence.finish_reason = FinishReason.LENGTH
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

    def _stop_token(self, sequence: Sequence, token_id: int, eos_token_ids: Items[int]) -> int | None:
        params = self.request.sampling
        if sequence.num_generated <= params.min_tokens:
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


def _choice_text(request: GenerateRequest, decode: Decode) -> ChoiceText:
    params = request.sampling
    return ChoiceText(
        lambda ids: decode(ids, params.skip_special_tokens),
        request.prompt_token_ids,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
    )
