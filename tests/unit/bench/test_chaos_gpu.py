from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.chaos_gpu import worker_values
from bench.chaos_questions import KINDS, questions
from cluster.client import TokenLogprob
from cluster.config import from_mapping
from tests.chaos.oracle import Question, Record
from tests.chaos.real_answers import ChoiceAnswer, RealQuestion, Transcript, compare, hold_to
from worker.config import WorkerConfig
from worker.request import FinishReason

RIGHT = (5, 6, 7, 8, 9, 10, 11, 12)


def answer(tokens: tuple[int, ...], stopped_by: str | None = None) -> ChoiceAnswer:
    logprobs = [TokenLogprob(token, -0.5, ((token, -0.5), (99, -0.625))) for token in tokens]
    return ChoiceAnswer(list(tokens), "text", logprobs, FinishReason.LENGTH, stopped_by)


def came(*choices: ChoiceAnswer, kind: str = "greedy") -> Transcript:
    question = RealQuestion(kind=kind, prompt="a", sampling={"n": len(choices), "logprobs": 2})
    whole = Transcript(question, list(choices), Record(question=Question(prompt=(), max_tokens=1)))
    compare(whole, [answer(RIGHT) for _ in choices])
    hold_to(whole, [answer(RIGHT) for _ in choices])
    return whole


def test_the_undisturbed_answer_breaks_nothing() -> None:
    whole = came(answer(RIGHT), answer(RIGHT))
    assert (whole.divergences, whole.record.violations) == ([], [])


def test_another_token_is_found_with_how_near_it_was() -> None:
    whole = came(answer((5, 6, 99, 8, 9, 10, 11, 12)))
    (one,) = whole.divergences
    assert (one.place, one.expected, one.got, one.gap) == (2, 7, 99, 0.125)
    assert (whole.record.num_changed, whole.record.num_duplicated, whole.record.num_lost) == (6, 0, 0)
    assert len(whole.record.violations) == 1


def test_a_token_that_was_not_among_the_likeliest_has_no_gap() -> None:
    assert came(answer((5, 6, 98, 8, 9, 10, 11, 12))).divergences[0].gap is None


def test_tokens_that_came_again_count_as_duplicated() -> None:
    whole = came(answer((5, 6, 7, 8, 5, 6, 7, 8)))
    assert (whole.record.num_duplicated, whole.record.num_changed) == (4, 0)


@pytest.mark.parametrize("extra", [(13,), (13, 14)])
def test_tokens_after_the_end_count_as_duplicated(extra: tuple[int, ...]) -> None:
    assert came(answer((*RIGHT, *extra))).record.num_duplicated == len(extra)


def test_missing_tokens_are_lost() -> None:
    whole = came(answer(RIGHT[:5]))
    assert (whole.record.num_lost, whole.divergences[0].got) == (3, None)


def test_equal_tokens_with_another_text_or_other_logprobs_are_not_the_same_answer() -> None:
    other = answer(RIGHT, stopped_by="x")
    other.text, other.logprobs[3] = "texts", TokenLogprob(8, -0.25, ())
    assert came(other).record.violations == [f"{name} of choice 0" for name in ("text", "logprobs", "stopped_by")]


def test_questions_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    asked = questions(60, seed=3, vocab_size=499, has_text=True, shows_gaps=False)
    assert asked == questions(60, seed=3, vocab_size=499, has_text=True, shows_gaps=False)
    assert {one.kind for one in asked} == {name.split(",")[0] for name in KINDS}
    assert any(one.n == 4 for one in asked)
    assert any("stop" in one.sampling for one in asked)


def test_without_a_tokenizer_prompts_are_ids_and_stops_too() -> None:
    asked = questions(60, seed=3, vocab_size=499, has_text=False, shows_gaps=True)
    assert all(max(one.prompt) < 499 for one in asked if not isinstance(one.prompt, str))
    assert not any(isinstance(one.prompt, str) or "stop" in one.sampling for one in asked)
    assert all(one.sampling["logprobs"] >= 2 for one in asked)
    assert any(one.shows_near_ties for one in asked)


@pytest.mark.parametrize(
    ("model", "random_weights"), [("tiny", False), ("smollm2-135m", True), ("smollm2-135m", False)]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_are_given_what_a_worker_takes(model: str, random_weights: bool, device: str, tmp_path: Path) -> None:
    options = argparse.Namespace(
        model=model, random_weights=random_weights, device=device, mode="deterministic", kv_mib=64, threads=1
    )
    config = from_mapping(WorkerConfig, worker_values(options, tmp_path))
    assert config.deterministic
    assert config.load_format == ("dummy" if random_weights or model == "tiny" else "auto")
    assert config.max_batch == (8 if device == "cpu" and model != "tiny" else 64)
