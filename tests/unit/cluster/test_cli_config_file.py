"""Options from a file: as on the command line, which comes first, and refused by name where they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from cluster.cli import router, serve, worker
from cluster.cli.app import app
from cluster.cli.config_file import MAX_BYTES

MODULES = {"serve": serve, "worker": worker, "router": router}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What commands would serve with: the arguments of their service, and the level of their log."""
    found: list[Any] = []

    def run_until_stopped(service: Callable[[], object], *, log_level: int) -> None:
        service()
        found.append(log_level)

    for name in MODULES:
        monkeypatch.setattr(f"cluster.cli.{name}._serve", lambda *arguments: found.extend(arguments))
        monkeypatch.setattr(f"cluster.cli.{name}.run_until_stopped", run_until_stopped)
    return found


def run(command: str, file: Path, text: str, *arguments: str) -> tuple[int, str]:
    file.write_text(text)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, "--config", str(file), *arguments])
    return done.exit_code, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pool.yaml"


def test_a_file_says_what_the_command_line_does_not(served: list[Any], file: Path) -> None:
    text = """
        port: 50099
        max_streams: 7
        wait-for-replica-s: 1.5
        replica: [10.0.0.5:50051, 10.0.0.6:50051]
        split-quotas: false
        policy: tier-fit
        log-level: error
        name:
    """
    assert run("router", file, text, "--max-streams", "9") == (0, "")
    config, _, level = served
    assert (config.listen, config.max_streams, config.wait_for_replica_s) == ("127.0.0.1:50099", 9, 1.5)
    assert (config.replicas, config.split_quotas) == (("10.0.0.5:50051", "10.0.0.6:50051"), False)
    assert (config.policy, config.name, level) == ("tier-fit", "", 40)


def test_lists_and_settings_are_those_of_a_worker(served: list[Any], file: Path) -> None:
    text = """
        model: /models/one
        tiers: [64, 128, 256, 512]
        set: {capture: startup, prefix_cache: false, max_graph_bytes: 4096}
        deterministic: false
        announce: 127.0.0.1:50050
    """
    assert run("worker", file, text) == (0, "")
    engine, config = served[:2]
    assert (engine.model, engine.tiers, engine.capture) == ("/models/one", (64, 128, 256, 512), "startup")
    assert (engine.prefix_cache, engine.max_graph_bytes) == (False, 4096)
    assert config.routers == ("127.0.0.1:50050",)


def test_the_environment_comes_before_the_file(served: list[Any], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPOOL_LOG_LEVEL", "debug")
    assert run("serve", file, "log-level: error")[0] == 0
    assert served[1] == 10


def test_an_empty_file_changes_nothing(served: list[Any], file: Path) -> None:
    assert run("serve", file, "# nothing yet\n") == (0, "")
    assert served[0].router.listen == "127.0.0.1:50050"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-steams: 3", "there is no option 'max-steams'; there are advertise, announce, buckets"),
        ("config: other.yaml", "there is no option 'config'"),
        ("5: 6", "there is no option 5"),
        ("max-batch: 5.5", "--max-batch"),
        ("max-batch: 0", "--max-batch"),
        ("port: true", "--port"),
        ("device: tpu", "--device"),
        ("insecure: 3", "insecure is 3, must be true or false"),
        ("port: {a: 1}", "port is {'a': 1}, must be a value"),
        ("tiers: [64, null]", "tiers is None, must be a value"),
        ("set: {no_such_field: 1}", "there is no 'no_such_field'"),
        ("max-batch: 3\nmax_batch: 4", "max-batch is said twice"),
        ("[1, 2]", "must hold names and values"),
        ("port: [", "cannot be read as YAML"),
        ("port: !!python/object:x", "cannot be read as YAML"),
        ("a" * (MAX_BYTES + 1), "is longer than"),
    ],
)
def test_what_is_wrong_in_a_file_is_wrong_usage_with_its_name(
    text: str, reason: str, served: list[Any], file: Path
) -> None:
    code, said = run("worker", file, text)
    assert code == 2
    assert reason in said
    assert "Traceback" not in said
    assert served == []


def test_a_file_that_is_not_there_is_named(served: list[Any]) -> None:
    done = CliRunner().invoke(app, ["router", "--config", "/nonexistent/pool.yaml"])
    assert done.exit_code == 2
    assert "/nonexistent/pool.yaml" in done.stderr
    assert served == []


@pytest.mark.parametrize("command", MODULES)
def test_every_option_of_a_service_can_be_in_a_file(command: str) -> None:
    found = typer.main.get_group(app).commands[command].params
    assert all(any(name.startswith("--") for name in parameter.opts) for parameter in found)
