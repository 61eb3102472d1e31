"""The record of places, over the processes that end there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.router.places import MAX_PLACES, MEMORY_S, Places

GPU = "GPU-1"


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def places() -> tuple[Places, ManualClock]:
    clock = ManualClock()
    return Places(pause_min_s=2.0, pause_max_s=60.0, clock=clock), clock


def test_one_bad_end_costs_nothing_and_each_further_one_twice_the_pause_up_to_the_longest() -> None:
    subject, clock = places()
    pauses = []
    for number in range(8):
        subject.ended(GPU, str(number), "it crashed")
        pauses.append(subject.pause_left_s(GPU))
        clock.now_s += 1
    assert pauses == [0, 2, 4, 8, 16, 32, 60, 60]
    assert subject.failing == {GPU: 8}
    assert subject.last_end(GPU) == "it crashed"
    assert subject.pause_left_s("GPU-2") == 0
    clock.now_s += 59
    assert subject.pause_left_s(GPU) == 0


def test_a_place_that_was_well_for_long_is_as_good_as_new() -> None:
    subject, clock = places()
    for number in range(3):
        subject.ended(GPU, str(number), "it crashed")
    clock.now_s += MEMORY_S + 4.0 + 0.1
    assert not subject.is_failing(GPU)
    subject.ended(GPU, "3", "it crashed")
    assert subject.num_ends(GPU) == 1


def test_a_process_whose_connection_broke_has_not_ended() -> None:
    subject, _ = places()
    subject.ended(GPU, "1", "it crashed")
    for _ in range(3):
        subject.ended(GPU, "2", "it crashed")
        assert subject.num_ends(GPU) == 2
        subject.lives(GPU, "2")
        assert subject.num_ends(GPU) == 1
    subject.lives(GPU, "3")
    assert subject.num_ends(GPU) == 1


def test_what_a_request_ended_is_not_the_places_fault_whichever_is_known_first() -> None:
    subject, _ = places()
    subject.ended(GPU, "1", "it crashed")
    subject.ended(GPU, "2", "it crashed")
    subject.excuse({"1", "3"})
    subject.ended(GPU, "3", "a step did not end")
    assert subject.num_ends(GPU) == 1
    assert subject.pause_left_s(GPU) == 0
    subject.excuse({"2"})
    assert subject.last_end(GPU) == ""


def test_only_so_many_places_are_remembered() -> None:
    subject, _ = places()
    for number in range(MAX_PLACES + 5):
        for incarnation in "ab":
            subject.ended(str(number), incarnation, "it crashed")
    assert len(subject.failing) == MAX_PLACES
    assert not subject.is_failing("4")
    assert subject.is_failing("5")


EVENTS = st.tuples(st.sampled_from(["ended", "lives", "excuse"]), st.sampled_from("abcdef"), st.floats(0, 900))


@given(st.lists(EVENTS, max_size=40))
def test_pauses_are_bounded_and_end_whatever_happens(events: list[tuple[str, str, float]]) -> None:
    subject, clock = places()
    for kind, incarnation, passed_s in events:
        clock.now_s += passed_s
        if kind == "ended":
            subject.ended(GPU, incarnation, "it crashed")
        elif kind == "lives":
            subject.lives(GPU, incarnation)
        else:
            subject.excuse({incarnation})
        assert 0 <= subject.pause_left_s(GPU) <= 60
        assert subject.num_ends(GPU) <= 6
    clock.now_s += MEMORY_S + 61
    assert subject.failing == {}
    assert subject.pause_left_s(GPU) == 0
