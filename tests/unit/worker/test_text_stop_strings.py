from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.stop_strings import StopStrings


def run(stop: Sequence[str], pieces: Sequence[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """All the text that was shown, and the stop string."""
    stops, shown = StopStrings(stop, include_stop=include_stop), ""
    for piece in pieces:
        text, found = stops.push(piece)
        shown += text
        if found is not None:
            return shown, found
    return shown + stops.finish(), None


def expected(stop: Sequence[str], text: str) -> tuple[str, str | None]:
    """Straight from the definition: the first string to be complete, of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_inside_a_piece_ends_the_text_before_it() -> None:
    assert run(["DE"], ["ABC", "DEF"]) == ("ABC", "DE")


@pytest.mark.parametrize("stop", ["beta gamma", "gamma", "👩‍👩‍👧", "aab", "abababc"])
def test_a_stop_string_is_found_wherever_it_is_split(stop: str) -> None:
    text = f"ababaab aa {stop} and more"
    before, _ = expected([stop], text)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert run([stop], [text[:first], text[first:second], text[second:]]) == (before, stop)


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete() -> None:
    stops = StopStrings(["DEFGHIJ"])

    assert [stops.push(piece)[0] for piece in ("ABC", "DEF", "G", "HI")] == ["ABC", "", "", ""]
    assert stops.push("JK") == ("", "DEFGHIJ")


def test_what_was_held_back_is_released_when_it_turns_out_otherwise() -> None:
    stops = StopStrings(["DEFGHIJ"])

    assert [stops.push(piece)[0] for piece in ("DEF", "GX", "DE", "DEF", "")] == ["", "DEFGX", "", "DE", ""]
    assert stops.finish() == "DEF"


def test_a_stop_string_may_be_the_first_text() -> None:
    assert run(["Hi"], ["Hi there"]) == ("", "Hi")
    assert run(["H"], ["H"]) == ("", "H")


def test_the_stop_string_stays_when_asked_for_but_nothing_after_it() -> None:
    assert run(["lo", "zz"], ["Hel", "lo", " you"], include_stop=True) == ("Hello", "lo")
    assert run(["lo"], ["Hello you"], include_stop=True) == ("Hello", "lo")


def test_without_stop_strings_text_passes_as_it_is() -> None:
    assert run([], ["a", "", "bc"]) == ("abc", None)


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert run(["bcd", "c"], ["abcd"]) == ("ab", "c")
    assert run(["c", "abc", "bc"], ["xabc"]) == ("x", "abc")


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
    include_stop=st.booleans(),
)
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(
    stop: list[str], pieces: list[str], include_stop: bool
) -> None:
    before, found = expected(stop, "".join(pieces))

    assert run(stop, pieces, include_stop=include_stop) == (before + (found or "" if include_stop else ""), found)


@given(stop=st.text("ab", min_size=1, max_size=6), pieces=st.lists(st.text("ab", max_size=4), max_size=12))
def test_no_more_is_held_back_than_could_still_become_a_stop_string(stop: str, pieces: list[str]) -> None:
    stops, seen, shown = StopStrings([stop]), "", ""
    for piece in pieces:
        text, found = stops.push(piece)
        if found is not None:
            return
        seen, shown = seen + piece, shown + text
        held = seen.removeprefix(shown)
        assert shown + held == seen
        assert held == max((stop[:n] for n in range(len(stop)) if seen.endswith(stop[:n])), key=len)
