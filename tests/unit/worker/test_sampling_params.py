from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 101.0),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("min_tokens", -1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 2.5),
    ("logprobs", 21),
    ("logprobs", -1),
    ("n", 0),
    ("n", 9),
    ("n", 2**31 - 1),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("a",) * 17),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101.0}),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_value_out_of_range_is_refused_and_the_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 100, 2**31])
def test_ids_out_of_the_vocabulary_are_refused(field: str, token_id: int) -> None:
    params = SamplingParams(**{field: (token_id,)})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="vocabulary of 100"):
        params.check_vocabulary(100)


def test_a_refusal_survives_pickling_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequest("top_p", "2.0 is outside (0, 1]")))
    assert (error.field, str(error)) == ("top_p", "top_p: 2.0 is outside (0, 1]")
