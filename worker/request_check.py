"""Whether a model can serve a request, as far as that can be told before it is queued."""

from __future__ import annotations

from worker.errors import InvalidRequest
from worker.load import EngineInfo
from worker.request import GenerateRequest, check_delivered
from worker.sampling import SamplingParams, check_token_ids


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuse what this model can not serve. Raises InvalidRequest."""
    length, params = len(request.prompt_token_ids), request.sampling
    if length == 0:
        raise InvalidRequest("prompt", "is empty")
    if length >= info.max_model_len:
        raise InvalidRequest("prompt", f"has {length} tokens, the limit is {info.max_model_len - 1}")
    if params.max_tokens is not None and length + params.max_tokens > info.max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"{params.max_tokens} after a prompt of {length} tokens is more than the context of {info.max_model_len}",
        )
    if params.min_tokens > info.max_model_len - length:
        raise InvalidRequest("min_tokens", f"{params.min_tokens} is more than the context leaves")
    check_token_ids("prompt", request.prompt_token_ids, info.vocab_size)
    check_delivered(request, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
    params.check_vocabulary(info.vocab_size)
    _check_choice(params, info)
    if params.stop and not info.has_tokenizer:
        raise InvalidRequest("stop", "needs a tokenizer, and this model is served without one; use stop_token_ids")


def _check_choice(params: SamplingParams, info: EngineInfo) -> None:
    """Refuse a request that bans every token it allows until it has its `min_tokens`."""
    if not params.min_tokens:
        return
    banned = {*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
    if all(token_id in banned for token_id in params.allowed_token_ids or range(info.vocab_size)):
        raise InvalidRequest("min_tokens", "leaves no token to choose: all that are allowed would end the answer")
