from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes.tokenizers import byte_fallback, byte_level
from worker.text.choice_text import ChoiceText

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
HARD = [
    "naïve café, Dvořák's dům",
    "👩‍👩‍👧‍👦🏽 family and 🏴󠁧󠁢󠁳󠁣󠁴󠁿 flag",
    "漢字かな交じり文、句読点。",
    "مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดี",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b zero width, e\u0301 combining",
    "a  b   c\n\n\td  ",
]
texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(HARD)


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    choice = ChoiceText(decoder(tokenizer), prompt)
    return [*(choice.push([token_id]).text for token_id in ids), choice.finish()]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", HARD)
def test_pieces_join_to_the_text_and_never_show_half_a_character(text: str) -> None:
    pieces = stream(BYTE_LEVEL, encode(BYTE_LEVEL, "Say: "), encode(BYTE_LEVEL, text))

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(prompt=texts, answer=texts)
@example(prompt="", answer=" leading space")
@example(prompt="x", answer="\ufffd a real replacement character \ufffd")
def test_prompt_and_streamed_text_join_to_what_decoding_both_gives(prompt: str, answer: str) -> None:
    ids = encode(BYTE_LEVEL, prompt + answer)
    first = len(encode(BYTE_LEVEL, prompt))

    assert "".join(stream(BYTE_LEVEL, ids[:first], ids[first:])) == answer


@given(text=texts, cut=st.integers(0, 200))
@example(text="Emoji 🌶 here", cut=8)
@example(text="漢字漢字漢字漢字", cut=11)
def test_a_prompt_that_ends_inside_a_character_does_not_appear_in_the_answer(text: str, cut: int) -> None:
    ids, raw = encode(BYTE_LEVEL, text), text.encode()
    cut = min(cut, len(ids))  # in this vocabulary an id is a byte
    start = cut
    while start < len(raw) and raw[start] & 0xC0 == 0x80:
        start -= 1

    assert "".join(stream(BYTE_LEVEL, ids[:cut], ids[cut:])) == raw[start:].decode()


@given(prompt=st.text("abc ", min_size=1, max_size=12), answer=st.text("ab 漢é🌶", max_size=30))
@example(prompt="ab", answer="漢漢漢漢漢漢漢漢漢漢漢漢漢漢")
@example(prompt="ab", answer=" and then")
def test_spaces_and_runs_of_bytes_are_right_where_decoders_strip_and_fall_back(prompt: str, answer: str) -> None:
    before, ids = encode(BYTE_FALLBACK, prompt), encode(BYTE_FALLBACK, prompt + answer)
    decode = decoder(BYTE_FALLBACK)

    pieces = stream(BYTE_FALLBACK, before, ids[len(before) :])

    assert decode(before) + "".join(pieces) == decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_inside_a_run_of_bytes_does_not_appear_in_the_answer() -> None:
    ids = encode(BYTE_FALLBACK, "is 漢字漢")

    assert "".join(stream(BYTE_FALLBACK, ids[:-2], ids[-2:])) == "漢"


def test_a_half_character_at_the_end_is_shown_as_a_replacement() -> None:
    pieces = stream(BYTE_LEVEL, [], encode(BYTE_LEVEL, "ab🌶")[:-1])

    assert pieces == ["a", "b", "", "", "", "\ufffd"]


ALL_BYTES = "".join(map(chr, (*range(0x800), *range(0x1000, 0x10000, 0x1000), 0x10000, 0x50000, 0x90000, 0x100000)))
ID_OF_BYTE = dict(zip(ALL_BYTES.encode("utf-8", "surrogatepass"), encode(BYTE_LEVEL, ALL_BYTES), strict=True))


@given(raw=st.lists(st.sampled_from(sorted(ID_OF_BYTE)), max_size=60))
def test_bytes_that_are_no_text_come_out_as_decoding_them_at_once(raw: list[int]) -> None:
    ids = [ID_OF_BYTE[byte] for byte in raw]

    assert "".join(stream(BYTE_LEVEL, [], ids)) == bytes(raw).decode(errors="replace")


def test_endless_bytes_that_are_no_text_are_shown_and_not_gathered() -> None:
    half = encode(BYTE_LEVEL, "漢")[0]
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return BYTE_LEVEL.decode(list(ids))

    choice = ChoiceText(decode, [])
    shown = "".join(choice.push([half]).text for _ in range(1000)) + choice.finish()

    assert shown == "\ufffd" * 1000
    assert max(decoded) < 64


def test_special_tokens_bring_no_text_and_do_not_grow_the_work() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=True)

    choice = ChoiceText(decode, [1] * 5000)

    assert "".join(choice.push([2]).text for _ in range(500)) == ""
    assert choice.push(encode(BYTE_LEVEL, "ok")).text == "ok"
    assert longest < 64


STOPS = ["gamma del", "🌶🌶", "漢", "a", " ", "é"]


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings_are_found_over_token_borders(stop: str) -> None:
    text = f"Xx_{stop}_rest"
    ids, before = encode(BYTE_LEVEL, text), text[: text.index(stop)]
    for size in range(1, len(ids) + 1):
        choice, shown, found = ChoiceText(decoder(BYTE_LEVEL), [], (stop, "never")), "", None
        for start in range(0, len(ids), size):
            delta = choice.push(ids[start : start + size])
            shown, found = shown + delta.text, found or delta.stop_string

        assert (shown + choice.finish(), found) == (before, stop)


def test_a_stop_string_at_the_very_first_token_leaves_no_text() -> None:
    choice = ChoiceText(decoder(byte_level(words=["Hello"])), encode(BYTE_LEVEL, "Q: "), ("ell",))

    delta = choice.push(encode(byte_level(words=["Hello"]), "Hello")[:1])

    assert (delta.text, delta.stop_string) == ("H", "ell")


def test_the_stop_string_is_kept_when_asked_for() -> None:
    choice = ChoiceText(decoder(BYTE_LEVEL), [], ("END",), include_stop=True)

    delta = choice.push(encode(BYTE_LEVEL, "the END of it"))

    assert (delta.text, delta.stop_string, choice.finish()) == ("the END", "END", "")


def test_nothing_follows_a_stop_string() -> None:
    choice = ChoiceText(decoder(BYTE_LEVEL), [], ("b",))
    choice.push(encode(BYTE_LEVEL, "ab"))

    assert choice.push(encode(BYTE_LEVEL, "cab")).text == ""
    assert choice.finish() == ""


def test_what_only_began_like_a_stop_string_is_released_at_the_end() -> None:
    choice = ChoiceText(decoder(BYTE_LEVEL), [], ("stop here",))

    assert choice.push(encode(BYTE_LEVEL, "do not stop")).text == "do not "
    assert choice.finish() == "stop"


@settings(max_examples=50)
@given(text=texts, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(text: str, sizes: list[int]) -> None:
    ids, choice, start = encode(BYTE_LEVEL, text), ChoiceText(decoder(BYTE_LEVEL), []), 0
    pieces: list[str] = []
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(choice.push(ids[start : start + size]).text)
        start += size

    assert "".join(pieces) + choice.finish() == text


def test_replaying_delivered_tokens_rebuilds_the_state() -> None:
    ids = encode(BYTE_LEVEL, "one two 🌶 three")
    for cut in range(len(ids)):
        whole, resumed = (ChoiceText(decoder(BYTE_LEVEL), [], ("three",)) for _ in range(2))
        for token_id in ids[:cut]:
            whole.push([token_id])
        resumed.push(ids[:cut])

        assert [whole.push([i]) for i in ids[cut:]] == [resumed.push([i]) for i in ids[cut:]]


def test_a_token_costs_microseconds() -> None:
    ids = encode(BYTE_LEVEL, "The quick brown fox jumps over the lazy dog. " * 100)
    choice = ChoiceText(decoder(BYTE_LEVEL), ids[:20], ("<never>", "\n\nUser:"))

    best = min(_seconds(choice, ids[start : start + 500]) for start in range(0, 4000, 500)) / 500

    assert best < 100e-6


def _seconds(choice: ChoiceText, ids: Sequence[int]) -> float:
    start = time.perf_counter()
    for token_id in ids:
        choice.push([token_id])
    return time.perf_counter() - start
