"""`graphpool doctor`: each check on a good and a bad machine, the table, the exit code, bisection."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.doctor import bisect_text, findings_lines, findings_table
from cluster.doctor import gpu, machine, packages
from cluster.doctor.bisect import bisect_module
from cluster.doctor.finding import Finding, run_checks
from tests.fakes.checkpoints import config_dict, write_config

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
GIB = 1 << 30


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], env=WIDE)


def test_this_machine_is_fit_and_the_table_says_so(tmp_path: Path) -> None:
    done = invoke("--cache-dir", str(tmp_path))
    assert done.exit_code == 0, done.output
    for check in ("python", "torch", "ray", "grpcio", "protobuf", "driver", "graph capture", "ports", "open files"):
        assert check in done.stdout


def test_the_json_holds_every_check_with_a_remedy_for_what_is_not_well(tmp_path: Path) -> None:
    report = json.loads(invoke("--json", "--cache-dir", str(tmp_path)).stdout)
    assert report["ok"] is True
    assert {"torch", "shared memory", "cache folder", "secrets", "grpc loopback"} <= {
        it["check"] for it in report["checks"]
    }
    assert all(bool(it["remedy"]) for it in report["checks"] if it["status"] != "ok")


def test_a_failed_check_ends_with_exit_code_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(packages.FLOORS, "ray", (99, 0))
    done = invoke("--cache-dir", str(tmp_path))
    assert done.exit_code == 1
    assert "pip install 'ray>=99.0'" in done.stdout


def test_a_check_that_raises_is_a_failed_check_and_the_others_still_run() -> None:
    def broken() -> Finding:
        raise OSError("the disk is on fire\nin two places")

    found = list(run_checks([("disk", broken), ("python", packages.check_python)]))
    assert [finding.status for finding in found] == ["fail", "ok"]
    assert found[0].detail == "OSError: the disk is on fire"


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (lambda: packages.check_package("protobuf"), "ok"),
        (lambda: machine.check_memory(GIB // 2), "fail"),
        (lambda: machine.check_memory(2 * GIB), "warn"),
        (lambda: machine.check_memory(64 * GIB), "ok"),
        (lambda: machine.check_open_files(256), "fail"),
        (lambda: machine.check_open_files(1024), "warn"),
        (lambda: machine.check_open_files(-1), "ok"),
        (lambda: machine.check_shared_memory(Path("/nonexistent")), "warn"),
        (lambda: machine.check_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}), "fail"),
        (lambda: machine.check_environment({"CUDA_LAUNCH_BLOCKING": "1"}), "warn"),
        (lambda: machine.check_environment({"CUDA_VISIBLE_DEVICES": ""}), "warn"),
        (lambda: machine.check_environment({"CUDA_LAUNCH_BLOCKING": "0"}), "ok"),
        (lambda: machine.check_proxies({"HTTPS_PROXY": "http://proxy:1"}), "warn"),
        (lambda: machine.check_proxies({"HTTPS_PROXY": "http://proxy:1", "no_proxy": "localhost"}), "ok"),
        (lambda: machine.check_cache_dir(Path("/proc/nowhere")), "fail"),
    ],
)
def test_each_check_tells_good_from_bad(check: Callable[[], Finding], status: str) -> None:
    found = check()
    assert found.status == status
    assert bool(found.remedy) == (status != "ok")


def test_secrets_are_named_but_never_shown() -> None:
    found = machine.check_secrets({"HF_TOKEN": "hunter2", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root"})
    assert found.status == "warn"
    assert "AWS_SECRET_ACCESS_KEY, HF_TOKEN" in found.detail
    assert "hunter2" not in f"{found}"
    assert machine.check_secrets({"HOME": "/root"}).status == "ok"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = machine.check_ports({port: "router"})
    assert found.status == "warn"
    assert f"{port} (router)" in found.detail


def test_a_package_that_is_missing_or_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.FLOORS, "no-such-package", (1, 0))
    assert packages.check_package("no-such-package").detail == "not installed"
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.10.1+cu130")
    assert packages.check_package("torch").status == "fail"
    assert packages.version_tuple("2.11.0rc1+cu130") == (2, 11, 0)


@pytest.mark.parametrize(
    ("driver", "built_for", "status"),
    [
        (13000, "13.0", "ok"),
        (13010, "12.8", "ok"),
        (12080, "13.0", "fail"),
        (12080, None, "fail"),
        (None, None, "warn"),
    ],
)
def test_the_driver_is_compared_with_what_torch_was_built_for(
    driver: int | None, built_for: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.graphs.cuda_backend.driver_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert gpu.check_driver_and_cuda().status == status


def test_a_capture_that_fails_is_reported_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.check_capture().status == "ok"
    monkeypatch.setattr("worker.graphs.smoke._capture_and_replay", lambda _: "replaying x + 1 at 1.0 gave 7.0")
    found = gpu.check_capture()
    assert found.status == "fail"
    assert "gave 7.0" in found.detail


def test_the_table_shows_every_remedy() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(findings_table([Finding("disk", "fail", "full [of] things", "delete some")]))
    text = console.export_text()
    assert "full [of] things" in text
    assert "delete some" in text


class Router(nn.Module):
    """Branches on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def test_bisection_finds_the_layer_and_the_operator() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Router()), nn.Linear(4, 4))
    report = bisect_module(model, "routed", {"input": torch.ones(2, 4)})
    assert not report.is_ok
    assert (report.layer, report.layer_class) == ("1.1", "Router")
    assert "item" in report.error
    assert "Remedy" in report.error
    text = str(bisect_text(report))
    assert "1.1 (Router)" in text
    assert report.findings


def test_a_model_that_can_be_captured_is_reported_whole(tmp_path: Path) -> None:
    model = write_config(tmp_path, config_dict("llama"))
    done = invoke("--bisect", str(model))
    assert done.exit_code == 0, done.output
    assert "can be captured whole on cpu" in done.stdout


def test_what_a_worker_refuses_by_name_is_found_by_bisection(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = write_config(tmp_path, config_dict("llama", rope_parameters=rope))
    done = invoke("--bisect", str(model), "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["layer"].endswith("rotary_emb")
    assert "Remedy" in report["error"]


def test_bisecting_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = invoke("--bisect", str(tmp_path / "nothing"))
    assert done.exit_code == 1
    assert "Traceback" not in done.output


def test_places_with_long_names_leave_the_whole_width_to_what_was_found() -> None:
    from rich.console import Console

    file = io.StringIO()
    place = "several-models.yaml line 1234: applications[0].args.worker.model"
    found = [Finding(place, "fail", "found [this]", "say so"), Finding("a.yaml", "ok", "fine", "")]
    Console(file=file, width=80).print(findings_lines(found))
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        *(f"fail  {place}", "      found [this]: say so", "ok    a.yaml", "      fine")
    ]
