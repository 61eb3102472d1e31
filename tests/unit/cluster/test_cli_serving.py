"""`graphpool router`, and what every command has in common. Replicas are scripted: no Ray, no model."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.client import GraphpoolClient
from tests.fakes.command_line import graphpool, read_until, running, scripted_replica
from tests.fakes.scrape import fetch, parse

COMMANDS = ("serve", "worker", "router", "chat", "generate", "status", "top", "drain", "plan")
AT = r"at (127\.0\.0\.1:\d+)"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    group = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert name in group.stdout
    done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    commands = typer.main.get_group(app).commands
    undocumented = [option.name for option in commands[name].params if not getattr(option, "help", "")]
    assert undocumented == []


def test_exit_codes_are_in_the_help() -> None:
    help_text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout.split())
    assert "0 done, 1 it failed" in help_text
    assert "2 wrong usage" in help_text


def test_without_arguments_the_help_shows() -> None:
    assert "serve" in CliRunner().invoke(app, []).output


def test_the_version_is_one_line() -> None:
    done = graphpool("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("graphpool ")
    assert done.stdout.count("\n") == 1


def test_a_router_serves_a_static_replica_and_stops_cleanly_on_ctrl_c() -> None:
    with (
        scripted_replica() as replica,
        running("router", "--port", "0", "--replica", replica, stderr=subprocess.PIPE) as router,
    ):
        address = read_until(router, AT)[1]
        with GraphpoolClient(address) as client:
            answer = client.generate([5, 6], max_tokens=4, temperature=0.0)
        assert len(answer.token_ids) == 4
        router.send_signal(signal.SIGINT)
        assert router.wait(30) == 0


def test_stopping_a_router_lets_a_running_answer_finish() -> None:
    with (
        scripted_replica(step_s=0.01) as replica,
        running("router", "--port", "0", "--replica", replica, stderr=subprocess.PIPE) as router,
    ):
        with GraphpoolClient(read_until(router, AT)[1]) as client:
            stream = client.stream([5, 6], max_tokens=100, temperature=0.0)
            num_tokens = len(next(stream).token_ids)
            router.send_signal(signal.SIGTERM)
            num_tokens += sum(len(piece.token_ids) for piece in stream)
        assert num_tokens == 100
        assert router.wait(30) == 0


def test_ctrl_c_before_a_command_has_begun_leaves_no_traceback() -> None:
    code = (
        "import builtins, cluster.cli\n"
        "load = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'cluster.cli.serve':\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "cluster.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_taken_port_is_one_sentence() -> None:
    with running("router", "--port", "0", stderr=subprocess.PIPE) as router:
        port = read_until(router, AT)[1].rpartition(":")[2]
        done = graphpool("router", "--port", port)
    assert done.returncode == 1
    assert port in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_router_without_replicas_says_so() -> None:
    with running("router", "--port", "0", stderr=subprocess.PIPE) as router:
        address = read_until(router, AT)[1]
        done = graphpool("status", "--address", address)
    assert done.returncode == 1
    assert done.stderr == "no replica is ready\n"


@pytest.mark.parametrize("name", ["serve", "worker"])
def test_a_model_that_is_not_there_is_one_sentence_before_anything_starts(name: str) -> None:
    done = graphpool(name, "--model", "/nowhere/model.gguf", "--port", "0")
    assert done.returncode == 1
    assert "/nowhere/model.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_router_says_where_its_metrics_are() -> None:
    with running("router", "--port", "0", "--metrics-port", "0", stderr=subprocess.PIPE) as router:
        address = read_until(router, r"http://(127\.0\.0\.1:\d+)/metrics")[1]
        assert parse(fetch(address)).value("replicas", state="ready") == 0
        assert "graphpool_router_seconds_bucket" in fetch(address)


def test_metrics_for_others_need_to_be_asked_for() -> None:
    done = graphpool("router", "--port", "0", "--host", "0.0.0.0", "--metrics-port", "0")
    assert done.returncode == 2
    assert "insecure" in done.stderr


def test_a_replica_that_is_drained_finishes_and_leaves() -> None:
    with (
        scripted_replica(step_s=0.01) as replica,
        running("router", "--port", "0", "--replica", replica, stderr=subprocess.PIPE) as router,
    ):
        address = read_until(router, AT)[1]
        with GraphpoolClient(address) as client:
            stream = client.stream([5, 6], max_tokens=100, temperature=0.0)
            pieces = [next(stream)]
            done = graphpool("drain", "scripted", "--address", address)
            pieces += list(stream)
        left = graphpool("status", "--address", address)
        unknown = graphpool("drain", "nobody", "--address", address)
    assert (done.returncode, done.stdout) == (0, "scripted has drained\n")
    assert sum(len(piece.token_ids) for piece in pieces) == 100
    assert "STOPPED" in left.stdout
    assert (left.returncode, unknown.returncode) == (1, 1)
    assert "no replica is called 'nobody'" in unknown.stderr


def test_no_name_at_all_drains_nothing() -> None:
    assert graphpool("drain", "").returncode == 2
