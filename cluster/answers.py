"""From what an engine gives to wire messages, and from pieces of an answer to the whole."""

from __future__ import annotations

from protos import control_pb2, generation_pb2
from worker.load import EngineInfo, GraphReadiness, LoadSnapshot
from worker.request import ChoiceDelta, FinishReason, Logprob, Timings

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
READINESS = {
    GraphReadiness.EAGER: control_pb2.GRAPH_READINESS_EAGER,
    GraphReadiness.PARTIAL: control_pb2.GRAPH_READINESS_PARTIAL,
    GraphReadiness.FULL: control_pb2.GRAPH_READINESS_FULL,
}


def extend_choice(choice: generation_pb2.Choice, delta: ChoiceDelta) -> None:
    """Append what one step brought to a choice that is not sent yet."""
    if delta.token_ids:
        choice.token_ids.extend(delta.token_ids)
    if delta.text:
        choice.text += delta.text
    for logprob in delta.logprobs:
        choice.logprobs.append(logprob_to_proto(logprob))
    if delta.finish_reason is None:
        return
    choice.finish_reason = FINISH_REASONS[delta.finish_reason]
    if delta.stop_string is not None:
        choice.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        choice.stop_token_id = delta.stop_token_id


def logprob_to_proto(logprob: Logprob) -> generation_pb2.TokenLogprob:
    """One token's log-probability with its rivals."""
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return generation_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def timings_to_proto(timings: Timings) -> generation_pb2.Timings:
    """Seconds on an engine's clock to milliseconds on the wire."""
    return generation_pb2.Timings(
        queue_ms=1000 * timings.queue_s,
        prefill_ms=1000 * timings.prefill_s,
        decode_ms=1000 * timings.decode_s,
    )


def load_to_proto(load: LoadSnapshot) -> control_pb2.Load:
    """A snapshot of an engine's load."""
    tiers = [
        control_pb2.TierLoad(tier=tier.tier, running=tier.running, free_slots=tier.free_slots) for tier in load.tiers
    ]
    return control_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        outstanding_tokens=load.outstanding_tokens,
        tiers=tiers,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        queue_age_s=load.queue_age_s,
        steps=load.steps,
        step_ms=load.step_ms,
        tokens_per_s=load.tokens_per_s,
        readiness=READINESS[load.readiness],
        graph_replays=load.graph_replays,
        eager_steps=load.eager_steps,
        prefix_cache_queries=load.prefix_cache_queries,
        prefix_cache_hits=load.prefix_cache_hits,
        max_rows=load.max_rows,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        prefill_token_ms=load.prefill_token_ms,
        predicted_ttft_s=load.predicted_ttft_s,
        step_age_s=load.step_age_s,
        predicted_step_s=load.predicted_step_s,
        is_preparing=load.is_preparing,
    )


def model_to_proto(info: EngineInfo) -> control_pb2.ModelInfo:
    """What an engine serves."""
    return control_pb2.ModelInfo(
        name=info.model,
        architecture=info.architecture,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        tiers=info.tiers,
        buckets=info.buckets,
        dtype=info.dtype,
        device=info.device,
        has_tokenizer=info.has_tokenizer,
        has_chat_template=info.has_chat_template,
        is_deterministic=info.is_deterministic,
    )


class AnswerFold:
    """Puts the pieces of one answer together again."""

    def __init__(self) -> None:
        self._whole = generation_pb2.GenerateResponse()
        self._choices: dict[int, generation_pb2.Choice] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, piece: generation_pb2.GenerateResponse) -> None:
        """Take the next piece, in the order of the stream."""
        for choice in piece.choices:
            self._add_choice(choice)
        self._whole.request_id = piece.request_id
        if piece.HasField("usage"):
            self._whole.usage.MergeFrom(piece.usage)
        if piece.HasField("timings"):
            self._whole.timings.CopyFrom(piece.timings)
        if piece.HasField("execution"):
            self._whole.execution.CopyFrom(piece.execution)

    def result(self) -> generation_pb2.GenerateResponse:
        """The whole answer, choices in order of their index."""
        for index, choice in sorted(self._choices.items()):
            choice.text = "".join(self._texts[index])
            self._whole.choices.append(choice)
        return self._whole

    def _add_choice(self, piece: generation_pb2.Choice) -> None:
        whole = self._choices.get(piece.index)
        if whole is None:
            whole = self._choices[piece.index] = generation_pb2.Choice(index=piece.index)
            self._texts[piece.index] = []
        self._texts[piece.index].append(piece.text)
        whole.token_ids.extend(piece.token_ids)
        whole.logprobs.extend(piece.logprobs)
        if piece.finish_reason:
            whole.finish_reason = piece.finish_reason
        stopped_by = piece.WhichOneof("stopped_by")
        if stopped_by is not None:
            setattr(whole, stopped_by, getattr(piece, stopped_by))


def chat_response(piece: generation_pb2.GenerateResponse) -> generation_pb2.ChatResponse:
    """The same piece of an answer, or the whole of it, as a message of the assistant."""
    chat = generation_pb2.ChatResponse(request_id=piece.request_id, sequence=piece.sequence)
    for choice in piece.choices:
        chat.choices.append(_chat_choice(choice))
    if piece.HasField("usage"):
        chat.usage.CopyFrom(piece.usage)
    if piece.HasField("timings"):
        chat.timings.CopyFrom(piece.timings)
    if piece.HasField("execution"):
        chat.execution.CopyFrom(piece.execution)
    if piece.HasField("seed"):
        chat.seed = piece.seed
    return chat


def _chat_choice(choice: generation_pb2.Choice) -> generation_pb2.ChatChoice:
    chat = generation_pb2.ChatChoice(
        index=choice.index,
        message=generation_pb2.ChatMessage(role="assistant", content=choice.text),
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
    )
    stopped_by = choice.WhichOneof("stopped_by")
    if stopped_by is not None:
        setattr(chat, stopped_by, getattr(choice, stopped_by))
    return chat
