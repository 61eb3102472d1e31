"""The scripts that `ray up` runs on nodes, with stand-ins for Python and graphpool that write down how they are called."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.command_line import ROOT

NODE = ROOT / "deploy" / "node"
CALLED = '#!/bin/bash\necho "$(basename "$0") $*" >>"$HOME/called"\n'
ROUTER = CALLED + 'trap "sleep 0.2; echo ended >>$HOME/called; exit 0" TERM\nwhile :; do sleep 0.05; done\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A node's home as `ray up` fills it, with an environment of stand-ins."""
    shutil.copytree(NODE, tmp_path / "graphpool" / "deploy" / "node")
    (tmp_path / "graphpool" / "wheel").mkdir()
    (tmp_path / "graphpool" / "wheel" / "graphpool-1.whl").write_bytes(b"wheel")
    (tmp_path / "graphpool" / "constraints.txt").write_text("ray==2.60.0\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    write_program(tmp_path, "python", CALLED)
    write_program(tmp_path, "graphpool", CALLED)
    (tmp_path / "graphpool-env" / "bin" / "activate").write_text('PATH="$HOME/graphpool-env/bin:$PATH"\n')
    return tmp_path


def write_program(home: Path, name: str, text: str) -> None:
    path = home / "graphpool-env" / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(home: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", str(home / "graphpool/deploy/node" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def called(home: Path) -> list[str]:
    return (home / "called").read_text().splitlines() if (home / "called").exists() else []


def test_a_node_installs_once_and_shows_its_health_each_time(home: Path) -> None:
    for _ in range(2):
        assert run(home, "setup.sh").returncode == 0
    assert [line.split()[0] for line in called(home)] == ["python", "python", "graphpool", "graphpool"]
    assert called(home)[-1] == "graphpool doctor"


@pytest.mark.parametrize("changed", ["wheel/graphpool-1.whl", "constraints.txt"])
def test_a_node_installs_again_when_something_has_changed(home: Path, changed: str) -> None:
    run(home, "setup.sh")
    (home / "graphpool" / changed).write_text("changed")
    run(home, "setup.sh")
    assert sum("pip install" in line for line in called(home)) == 4


def test_more_packages_are_not_held_to_the_pins(home: Path) -> None:
    run(home, "setup.sh", "boto3==1.2.3")
    installs = [line for line in called(home) if "pip install" in line]
    assert ["--constraint" in line for line in installs] == [False, True, False]
    assert installs[-1].endswith("boto3==1.2.3")


def test_a_failed_installation_is_tried_again(home: Path) -> None:
    write_program(home, "python", CALLED + "exit 1\n")
    assert run(home, "setup.sh").returncode == 1
    write_program(home, "python", CALLED)
    assert run(home, "setup.sh").returncode == 0
    assert sum("pip install" in line for line in called(home)) == 3


def test_a_node_that_cannot_serve_ends_the_set_up(home: Path) -> None:
    write_program(home, "graphpool", CALLED + "exit 1\n")
    assert run(home, "setup.sh").returncode == 1


def test_a_machine_without_python_says_what_to_install(home: Path) -> None:
    shutil.rmtree(home / "graphpool-env")
    done = run(home, "setup.sh", PATH=str(programs_without_python(home)))
    assert done.returncode == 1
    assert "install python3.12" in done.stderr


def programs_without_python(home: Path) -> Path:
    folder = home / "programs"
    folder.mkdir()
    for name in ("bash", "cat", "sha256sum", "chmod", "grep"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def test_the_set_up_hides_the_token_and_puts_the_commands_on_the_path_once(home: Path) -> None:
    for _ in range(2):
        run(home, "setup.sh")
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert (home / ".bashrc").read_text().count("graphpool-env/bin") == 1


@pytest.fixture
def router_home(home: Path) -> Iterator[Path]:
    write_program(home, "graphpool", ROUTER)
    yield home
    run(home, "router.sh", "stop")


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def routers(home: Path) -> list[psutil.Process]:
    """Those that run now."""
    keeper = psutil.Process(int((home / "graphpool-router.pid").read_text()))
    return [child for child in keeper.children() if "graphpool" in " ".join(child.cmdline())]


def test_a_router_outlives_the_command_that_starts_it_and_is_started_again_when_it_dies(router_home: Path) -> None:
    assert run(router_home, "router.sh", "start").returncode == 0
    wait_for(lambda: len(called(router_home)) == 1)
    assert called(router_home)[0].startswith("graphpool router --host 0.0.0.0 --port 50050")
    os.kill(routers(router_home)[0].pid, signal.SIGKILL)
    wait_for(lambda: len(called(router_home)) == 2)


def test_stopping_waits_until_the_router_has_finished(router_home: Path) -> None:
    run(router_home, "router.sh", "start")
    wait_for(lambda: len(called(router_home)) == 1)
    assert run(router_home, "router.sh", "stop").returncode == 0
    assert called(router_home)[-1] == "ended"
    assert not (router_home / "graphpool-router.pid").exists()
    assert run(router_home, "router.sh", "stop").returncode == 0


def test_a_number_that_is_somebody_elses_by_now_is_left_alone(home: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (home / "graphpool-router.pid").write_text(str(other.pid))
        assert run(home, "router.sh", "stop").returncode == 0
        assert other.poll() is None
        other.kill()


def test_starting_again_leaves_one_router(router_home: Path) -> None:
    for _ in range(2):
        run(router_home, "router.sh", "start")
        wait_for(lambda: bool(called(router_home)) and called(router_home)[-1].startswith("graphpool router"))
    assert len(routers(router_home)) == 1
    assert called(router_home).count("ended") == 1


@pytest.mark.parametrize(
    ("host", "ray_head_ip", "starts"), [("head", "", True), ("head", "10.0.0.1", False), ("192.0.2.77", "", False)]
)
def test_the_router_starts_on_its_node_alone(router_home: Path, host: str, ray_head_ip: str, starts: bool) -> None:
    options = router_home / "graphpool" / "deploy" / "node" / "router.env"
    options.write_text(options.read_text().replace("ROUTER_HOST=head", f"ROUTER_HOST={host}"))
    assert run(router_home, "router.sh", "start-here", RAY_HEAD_IP=ray_head_ip).returncode == 0
    assert (router_home / "graphpool-router.pid").exists() == starts


def test_an_unknown_word_shows_the_usage(home: Path) -> None:
    done = run(home, "router.sh", "begin")
    assert done.returncode == 2
    assert "router.sh start-here" in done.stderr
