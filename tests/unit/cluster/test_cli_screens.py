"""What commands and the demo write: tables, plain values, growing answers, start-up lines."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.cli.answer_values import answer_values
from cluster.cli.load_table import load_table, pool_table
from cluster.cli.startup import StartupLines
from cluster.cli.terminal import printable
from cluster.client import Answer, AsyncGraphpoolClient, Choice, PoolStatus
from cluster.demo.screen import LINE, ChatScreen, chat_table, whole_lines
from cluster.demo.watched import WatchedChat
from cluster.load_values import load_values
from protos import control_pb2, generation_pb2
from tests.fakes.script_pool import script_pool
from worker.request import FinishReason

READY = control_pb2.ReplicaLoad(
    replica="replica-1",
    address="127.0.0.1:4000",
    state=control_pb2.REPLICA_STATE_READY,
    load=control_pb2.Load(
        running=3,
        waiting=2,
        tiers=[control_pb2.TierLoad(tier=256, running=3, free_slots=13)],
        free_blocks=90,
        total_blocks=100,
        steps=2**40,
        step_ms=12.34,
        tokens_per_s=77.7,
        readiness=control_pb2.GRAPH_READINESS_FULL,
    ),
)
STARTING = control_pb2.ReplicaLoad(replica="replica-0", state=control_pb2.REPLICA_STATE_STARTING)


def shown(thing: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_has_a_line_for_each_replica_in_the_order_of_their_names() -> None:
    header, first, second = shown(load_table([READY, STARTING])).splitlines()
    assert header.split() == ["replica", "state", "≤256", "run", "wait", "tok/s", "step", "ms", "blocks", "graphs"]
    assert first.split() == ["replica-0", "STARTING", *["-"] * 7]
    assert second.split() == ["replica-1", "READY", "3+13", "3", "2", "77.7", "12.3", "10/100", "full"]


def test_a_breaker_that_is_not_closed_and_a_slow_replica_show_in_the_state() -> None:
    slow, out = control_pb2.ReplicaLoad(), control_pb2.ReplicaLoad()
    slow.CopyFrom(READY)
    slow.slowness, slow.breaker = 5.04, control_pb2.BREAKER_CLOSED
    out.CopyFrom(STARTING)
    out.breaker = control_pb2.BREAKER_HALF_OPEN
    lines = shown(load_table([slow, out])).splitlines()
    assert lines[1].split()[1:3] == ["STARTING", "half_open"]
    assert lines[2].split()[1:3] == ["READY", "5.0x"]
    assert load_values(slow)["breaker"] == "closed"


def test_the_table_of_four_tiers_fits_a_terminal_of_80_columns() -> None:
    wide = control_pb2.ReplicaLoad()
    wide.CopyFrom(READY)
    wide.load.tiers.extend(control_pb2.TierLoad(tier=tier, running=16, free_slots=0) for tier in (1024, 4096, 8192))
    assert "…" not in shown(load_table([wide, STARTING]))


def test_of_several_models_each_replica_tells_its_own() -> None:
    def replica(name: str, model: str) -> control_pb2.ReplicaLoad:
        load = control_pb2.ReplicaLoad(model=model)
        load.MergeFrom(READY)
        load.replica = name
        return load

    server = control_pb2.ServerInfo(role="router", id="r", model="one")
    same = shown(pool_table(PoolStatus(server, [replica("a", "one"), replica("b", "one")])))
    assert ", serves one\n" in same
    assert "model" not in same
    mixed = shown(pool_table(PoolStatus(server, [replica("a", "one"), replica("b", "two"), STARTING])))
    assert ", serves one, two\n" in mixed
    assert [line.split()[:3] for line in mixed.splitlines()[1:]] == [
        ["replica", "model", "state"],
        ["a", "one", "READY"],
        ["b", "two", "READY"],
        ["replica-0", "-", "STARTING"],
    ]


def test_a_pool_without_replicas_says_so() -> None:
    server = control_pb2.ServerInfo(role="router", id="r", uptime_s=3723)
    assert shown(pool_table(PoolStatus(server, []))).splitlines() == ["router r, up 1 h 2 min", "no replica is known"]


def test_plain_values_are_json_with_real_numbers_and_words() -> None:
    values = json.loads(json.dumps(load_values(READY)))
    assert values["state"] == "READY"
    assert values["load"]["readiness"] == "full"
    assert values["load"]["steps"] == 2**40
    assert values["load"]["prefix_cache_hits"] == 0
    assert values["router_outstanding_tokens"] == 0


def test_the_pieces_of_an_answer_become_one() -> None:
    def piece(text: str, ids: tuple[int, ...], finish: FinishReason | None = None) -> Answer:
        choice = Choice(index=0, text=text, token_ids=ids, finish_reason=finish)
        usage = generation_pb2.Usage(prompt_tokens=2, completion_tokens=3) if finish else None
        return Answer(request_id="r", choices=(choice,), sequence=0, usage=usage, timings=None, execution=None)

    values = answer_values([piece("a", (1,)), piece("b", (2, 3)), piece("", (), FinishReason.STOP)])
    assert values["text"] == "ab"
    assert values["token_ids"] == [1, 2, 3]
    assert values["finish_reason"] == "stop"
    assert values["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}
    assert values["execution"] is None


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\nc\td\u00e9\u4e2d\x9b2J") == "a]0;titleb\nc\td\u00e9\u4e2d2J"


def test_without_a_terminal_each_phase_is_a_line() -> None:
    out = io.StringIO()
    with StartupLines(Console(file=out, width=80)) as lines:
        lines.doing("starting [Ray]")
        lines.doing("starting [Ray]")
        lines.model_progress("converting", 1, 2)
        lines.model_progress("converting", 2, 2)
        lines.done("Ray")
    said = [line.partition(" s  ")[2] for line in out.getvalue().splitlines()]
    assert said == ["starting [Ray] ...", "converting ...", "Ray"]


@given(st.text(alphabet="ab \n\u00e9", max_size=300), st.integers(0, 300))
def test_a_growing_answer_is_shown_whole_and_in_order(text: str, cut: int) -> None:
    shown_words: list[str] = []
    start = 0
    for known, is_last in ((text[:cut], False), (text, True)):
        for line, end in whole_lines(known, start, is_last=is_last):
            assert len(line) <= LINE
            shown_words.append(line)
            start = end
    assert start == len(text)
    assert "".join("".join(shown_words).split()) == "".join(text.split())


async def test_a_watched_chat_measures_what_it_sees() -> None:
    out = io.StringIO()
    chat = WatchedChat("why?")
    async with script_pool() as pool, AsyncGraphpoolClient(pool.router.address) as client:
        with ChatScreen(Console(file=out, width=100), [chat]) as screen:
            await chat.stream(client, screen.update, max_tokens=200, temperature=0.0)
        whole = await client.chat([("user", "why?")], max_tokens=200, temperature=0.0)
    assert chat.error is None
    assert (chat.text, tuple(chat.token_ids)) == (whole.text, whole.token_ids)
    assert chat.is_over
    assert 0 < chat.first_token_ms < 5000
    assert chat.tokens_per_s > 0
    assert out.getvalue().count("chat 1 |") >= 3
    assert "why" not in out.getvalue()
    assert str(len(chat.token_ids)) in shown(chat_table([chat]))


async def test_a_watched_chat_keeps_the_error_it_ends_with() -> None:
    chat = WatchedChat("why?")
    async with script_pool() as pool, AsyncGraphpoolClient(pool.router.address) as client:
        await chat.stream(client, temperature=-1.0)
    assert chat.error is not None
    assert chat.error.code.name == "INVALID_ARGUMENT"
    assert chat.is_over
    assert chat.tokens_per_s == 0.0


@pytest.mark.parametrize("has_terminal", [True, False])
def test_the_last_state_of_every_chat_is_on_the_screen(has_terminal: bool) -> None:
    out = io.StringIO()
    chats = [WatchedChat("first"), WatchedChat("second")]
    with ChatScreen(Console(file=out, width=100, force_terminal=has_terminal), chats) as screen:
        chats[1].text = "answer two"
        screen.update(chats[1])
        chats[0].text = "answer one"
    assert "answer one" in out.getvalue()
    assert "answer two" in out.getvalue()
