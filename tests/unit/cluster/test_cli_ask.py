"""`graphpool chat`, `generate` and `status` against a replica with a scripted engine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.client import GraphpoolClient
from tests.fakes.command_line import graphpool, running, scripted_replica

GREEDY = ("-t", "0", "-n", "12")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with scripted_replica() as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[GraphpoolClient]:
    with GraphpoolClient(address) as client:
        yield client


def test_chat_with_a_message_prints_the_answer_and_ends(address: str, client: GraphpoolClient) -> None:
    done = graphpool("chat", "hello", "--address", address, *GREEDY)
    expected = client.chat([("user", "hello")], temperature=0.0, max_tokens=12).text
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)


def test_chat_begins_with_the_system_message(address: str, client: GraphpoolClient) -> None:
    done = graphpool("chat", "hello", "--system", "be brief", "--address", address, *GREEDY)
    messages = [("system", "be brief"), ("user", "hello")]
    assert done.stdout == client.chat(messages, temperature=0.0, max_tokens=12).text + "\n"


def test_chat_reads_its_message_from_standard_input(address: str) -> None:
    given = graphpool("chat", "hello", "--address", address, *GREEDY)
    read = graphpool("chat", "-", "--address", address, *GREEDY, stdin="hello")
    assert read.stdout == given.stdout


def test_a_conversation_remembers_until_it_is_begun_again(address: str, client: GraphpoolClient) -> None:
    done = graphpool("chat", "--address", address, *GREEDY, stdin="one\ntwo\n/new\none\n/quit\n")
    first = client.chat([("user", "one")], temperature=0.0, max_tokens=12).text
    history = [("user", "one"), ("assistant", first), ("user", "two")]
    second = client.chat(history, temperature=0.0, max_tokens=12).text
    assert done.stdout.split("\n") == [first, second, first, ""]
    assert done.returncode == 0


@pytest.mark.parametrize("end", ["/quit", "/exit"])
def test_help_and_the_end_of_a_conversation_do_not_reach_the_model(end: str, address: str) -> None:
    done = graphpool("chat", "--address", address, *GREEDY, stdin=f"/help\n{end}\nunheard\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("/new starts over") == 2


def test_a_conversation_goes_on_after_a_refused_message(address: str) -> None:
    done = graphpool("chat", "--address", address, "-t", "0", "-n", "4000", stdin="x" * 200 + "\n/quit\n")
    assert "max_tokens" in done.stderr
    assert done.returncode == 0


def test_generate_continues_a_text(address: str, client: GraphpoolClient) -> None:
    done = graphpool("generate", "once", "--address", address, *GREEDY)
    assert done.stdout == client.generate("once", temperature=0.0, max_tokens=12).text + "\n"


def test_generate_with_token_ids_prints_token_ids(address: str, client: GraphpoolClient) -> None:
    done = graphpool("generate", "--token-ids", "5,6,7", "--address", address, *GREEDY)
    expected = client.generate([5, 6, 7], temperature=0.0, max_tokens=12).token_ids
    assert done.stdout == ",".join(map(str, expected)) + "\n"


def test_generate_as_json_holds_the_whole_answer(address: str, client: GraphpoolClient) -> None:
    done = graphpool("generate", "--token-ids", "5,6,7", "--json", "--address", address, *GREEDY)
    values = json.loads(done.stdout)
    assert values["token_ids"] == list(client.generate([5, 6, 7], temperature=0.0, max_tokens=12).token_ids)
    assert values["finish_reason"] == "length"
    assert values["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "cached_tokens": 0}
    assert values["execution"]["replica"] == "scripted"


def test_an_answer_as_json_names_the_seed_that_gives_it_again(address: str) -> None:
    ask = ("generate", "--token-ids", "5", "-n", "8", "-t", "1", "--json", "--address", address)
    drawn = json.loads(graphpool(*ask).stdout)
    again = json.loads(graphpool(*ask, "--seed", str(drawn["seed"])).stdout)
    assert (again["token_ids"], again["seed"]) == (drawn["token_ids"], drawn["seed"])


def test_chat_as_json_holds_the_whole_answer(address: str, client: GraphpoolClient) -> None:
    done = graphpool("chat", "hello", "--json", "--address", address, *GREEDY)
    assert json.loads(done.stdout)["text"] == client.chat([("user", "hello")], temperature=0.0, max_tokens=12).text


def test_choices_and_logprobs_show_as_json(address: str, client: GraphpoolClient) -> None:
    options = ("-n", "4", "-t", "1", "--seed", "7", "--choices", "3", "--logprobs", "1")
    values = json.loads(graphpool("generate", "--token-ids", "5", "--json", *options, "--address", address).stdout)
    expected = client.generate([5], max_tokens=4, temperature=1.0, seed=7, n=3, logprobs=1).choices
    assert [choice["index"] for choice in values["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in values["choices"]] == [list(choice.token_ids) for choice in expected]
    assert values["token_ids"] == values["choices"][0]["token_ids"]
    for shown, choice in zip(values["choices"], expected, strict=True):
        assert [one["logprob"] for one in shown["logprobs"]] == [one.logprob for one in choice.logprobs]
        assert [len(one["top"]) for one in shown["logprobs"]] == [1, 1, 1, 1]


@pytest.mark.parametrize("command", [("chat", "x"), ("generate", "x"), ("chat",)])
def test_a_model_that_is_not_served_is_refused_by_name(command: tuple[str, ...], address: str) -> None:
    done = graphpool(*command, "--model", "other", "--address", address, stdin="")
    assert done.returncode == 1
    assert "model: not served here" in done.stderr


def test_text_and_token_ids_have_the_same_end_when_none_is_given(address: str, client: GraphpoolClient) -> None:
    ids = client.tokenize("once")
    greedy = ("--json", "-t", "0", "--address", address)
    text = json.loads(graphpool("generate", "once", *greedy).stdout)
    given = json.loads(graphpool("generate", "--token-ids", ",".join(map(str, ids)), *greedy).stdout)
    assert given["token_ids"] == text["token_ids"]
    assert (given["finish_reason"], given["usage"]) == (text["finish_reason"], text["usage"])


def test_sampling_options_reach_the_engine(address: str, client: GraphpoolClient) -> None:
    done = graphpool("generate", "--token-ids", "5", "-n", "30", "-t", "1", "--seed", "7", "--address", address)
    expected = client.generate([5], temperature=1.0, seed=7, max_tokens=30).token_ids
    assert done.stdout == ",".join(map(str, expected)) + "\n"
    stopped = graphpool(
        *("generate", "--token-ids", "5", "-n", "30", "-t", "1", "--seed", "7", "--address", address),
        *("--stop-token-ids", str(expected[4])),
    )
    assert stopped.stdout == ",".join(map(str, expected[: expected.index(expected[4]) + 1])) + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "text", "--token-ids", "1"),
        ("generate", "--token-ids", "1,two"),
        ("chat", "x", "--temperature", "warm"),
        ("status", "--watch", "0"),
        ("chat", "--json"),
        ("chat", "x", "--choices", "2"),
        ("generate", "x", "--logprobs", "0"),
        ("router", "--log-level", "loud"),
        ("chat", "x", "--timeout-s", "inf"),
        ("chat", "x", "--address", ""),
        ("generate", "x", "--address", "nowhere"),
        ("status", "--address", "http://127.0.0.1:50050"),
        ("generate", "--token-ids", ""),
        ("serve", "--replicas", "0"),
        ("serve", "--replicas", "99999999999"),
        ("serve", "--tiers", ""),
        ("worker", "--buckets", ","),
        ("worker", "--threads", "100000"),
        ("worker", "--name", "a b"),
        ("worker", "--advertise", "a b"),
        ("router", "--max-streams", "9999999999"),
        ("serve", "--tiers", "a,b"),
        ("serve", "--host", "0.0.0.0"),
        ("worker", "--port", "70000"),
        ("worker", "--announce", "nowhere"),
        ("router", "--replica", "127.0.0.1:0"),
        ("unknown",),
    ],
)
def test_wrong_usage_is_exit_code_two_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Usage:" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [("chat", "x"), ("generate", "x"), ("status",), ("chat",), ("top",)])
def test_when_nothing_answers_one_sentence_says_so(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*arguments, "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr == "nothing answers at that address: is `graphpool serve` running, and on that port?\n"


def test_a_refused_value_is_one_sentence_with_its_field(address: str) -> None:
    done = graphpool("chat", "x", "-t", "-1", "--address", address)
    assert done.returncode == 1
    assert done.stderr.startswith("temperature: ")
    assert done.stderr.endswith(" (INVALID_ARGUMENT)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_argument_that_is_not_utf8_is_one_sentence(command: str, address: str) -> None:
    done = graphpool(command, "\udcff", "--address", address)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "codec" not in done.stderr


def test_status_shows_every_replica_with_its_tiers(address: str) -> None:
    done = graphpool("status", "--address", address)
    assert done.returncode == 0
    assert "scripted" in done.stdout
    assert "READY" in done.stdout
    assert "≤64" in done.stdout


def test_status_as_json_has_the_field_names_of_the_contract(address: str) -> None:
    values = json.loads(graphpool("status", "--json", "--address", address).stdout)
    assert values["server"]["role"] == "replica"
    (replica,) = values["replicas"]
    assert replica["state"] == "READY"
    assert [tier["tier"] for tier in replica["load"]["tiers"]] == [64, 256, 1024, 4096]
    assert replica["load"]["running"] == 0


def test_a_watched_status_repeats_until_it_is_interrupted(address: str) -> None:
    with running("status", "--json", "--watch", "0.1", "--address", address, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert lines[0]["server"]["uptime_s"] < lines[2]["server"]["uptime_s"]


def test_tokens_show_before_the_answer_is_complete() -> None:
    with (
        scripted_replica(step_s=0.02) as address,
        running(
            "generate", "--token-ids", "5", "-n", "100", "-t", "0", "-a", address, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(3)
        began_s = time.monotonic()
        process.wait(30)
        assert time.monotonic() - began_s > 1.0


def test_an_interrupted_answer_is_ended_on_the_server_too() -> None:
    with (
        scripted_replica(step_s=0.02) as address,
        running("generate", "--token-ids", "5", "-n", "4000", "-a", address, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        with GraphpoolClient(address) as client:
            give_up_s = time.monotonic() + 5
            while client.loads()[0].load.running:
                assert time.monotonic() < give_up_s
                time.sleep(0.05)


def test_a_reader_that_stops_reading_does_not_leave_a_traceback(address: str) -> None:
    arguments = ("generate", "--token-ids", "5", "-n", "2000", "-t", "0", "-a", address)
    with running(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 1
        process.stdout = None


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_of_several_addresses_the_next_one_answers_for_one_that_is_gone(command: str, address: str) -> None:
    done = graphpool(command, "hello", "--address", f"127.0.0.1:1,{address}", *GREEDY)
    alone = graphpool(command, "hello", "--address", address, *GREEDY)
    assert (done.stdout, done.returncode) == (alone.stdout, 0)
    assert done.stdout.strip()


def test_a_list_with_an_address_that_is_none_is_refused_before_anything_is_asked() -> None:
    done = graphpool("generate", "hello", "--address", "127.0.0.1:50050,nowhere", *GREEDY)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
