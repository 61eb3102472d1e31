"""`graphpool doctor deploy` on Serve configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.doctor.deploy.check import check_deployment
from cluster.doctor.finding import Finding
from tests.fakes.command_line import ROOT
from tests.fakes.explained import assert_explained

FOLDER = ROOT / "deploy" / "serve"
FILES = sorted(FOLDER.glob("*.yaml"))

Change = Callable[[dict[str, Any]], object]


def check(tmp_path: Path, change: Change, **options: Any) -> tuple[list[Finding], list[str]]:
    """Findings about pool.yaml after a change to its only application, and its lines."""
    values = yaml.safe_load((FOLDER / "pool.yaml").read_text())
    change(values)
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return check_deployment([file], **options), file.read_text().splitlines()


def application(**changes: Any) -> Change:
    return lambda values: values["applications"][0].update(changes)


def args(**changes: Any) -> Change:
    return lambda values: values["applications"][0]["args"].update(changes)


def part(of_args: str, /, **changes: Any) -> Change:
    return lambda values: values["applications"][0]["args"][of_args].update(changes)


def both(*changes: Change) -> Change:
    return lambda values: [change(values) for change in changes]


MISTAKES = [
    # change, text of the line it is reported for, part of the reason, part of the remedy
    (lambda v: v.pop("proxy_location"), "", "HTTP proxy on every node", "proxy_location: Disabled"),
    (lambda v: v.update(proxy_location="EveryNode"), "proxy_location: EveryNode", "open port", "Disabled"),
    (application(route_prefix="/llm"), "route_prefix: /llm", "HTTP route", "route_prefix: null"),
    (args(drain_timeout_s=30), "drain_timeout_s: 30", "30 s, but an answer of 8192 tokens at 10 ms takes 82 s", "drain_timeout_s: 90"),
    (part("worker", gpu_memory_fraction=1.5), "gpu_memory_fraction: 1.5", "gpu_memory_fraction is 1.5", "message"),
    (part("worker", max_modle_len=10), "max_modle_len", "max_modle_len", "message"),
    (args(num_gpus=0.5), "gpu_memory_fraction", "2 replicas share a GPU and each takes 0.85", "gpu_memory_fraction: 0.45"),
    (args(num_gpus=4), "num_gpus: 4", "would leave 3 idle", "num_gpus: 1"),
    (args(num_gpus=0), "num_gpus: 0", "given no GPU", "num_gpus: 1"),
    (both(args(num_gpus=None), part("worker", device="auto")), "args:", "decided where the config is read", "num_gpus: 1"),
    (part("replica", listen="127.0.0.1:0"), "listen: 127.0.0.1:0", "loopback", "0.0.0.0:0"),
    (part("replica", security={}), "listen", "TLS", "message"),
    (part("replica", routers=[]), "routers", "routers is empty", "message"),
    (part("replica", name="gpu"), "name: gpu", "several replicas would be called 'gpu'", "leave name out"),
    (application(import_pat="x"), "import_pat: x", "pass over it in silence", "import_path"),
    (application(name=3), "name: 3", "refuses", "reference"),
    (both(lambda v: v["applications"].append({**v["applications"][0], "name": "two"})), "scaling:", "load of all of them", "model_name"),
    (args(scaling={"min_replicas": 5, "max_replicas": 2}), "min_replicas: 5", "min_replicas is 5", "message"),
    (part("worker", api_key="0123456789abcdef"), "api_key", "plain text", "Kubernetes Secret"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line", "reason", "remedy"), MISTAKES)
def test_a_mistake_is_explained_where_it_is(
    tmp_path: Path, change: Change, line: str, reason: str, remedy: str
) -> None:
    findings, lines = check(tmp_path, change)
    assert_explained(findings, lines, line=line, reason=reason, remedy=remedy)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v: v["applications"][0]["args"]["worker"].pop("max_model_len"), "no max_model_len"),
        (lambda v: v["applications"][0]["args"]["worker"].pop("max_batch"), "no max_batch"),
        (part("replica", insecure=True), "in the clear"),
        (args(num_replicas=3), "the number does not count"),
        (part("worker", device="cpu"), "hold GPUs that they do not use"),
        (lambda v: v.update(http_options={"host": "0.0.0.0"}), "Serve's proxies"),
    ],
)
def test_what_works_less_well_is_a_warning(tmp_path: Path, change: Change, reason: str) -> None:
    findings, _ = check(tmp_path, change)
    assert any(one.status == "warn" and reason in one.detail for one in findings), findings


def test_the_length_of_a_drain_is_judged_by_a_measured_step(tmp_path: Path) -> None:
    findings, _ = check(tmp_path, args(drain_timeout_s=30), step_ms=2.5)
    assert not any(one.status == "fail" for one in findings)


def test_applications_of_others_are_left_alone(tmp_path: Path) -> None:
    findings, _ = check(tmp_path, application(import_path="mine.app:app", route_prefix="/mine", args={"x": 1}))
    assert [one.status for one in findings] == ["ok"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_shipped_file_has_no_mistake(file: Path) -> None:
    assert not [one for one in check_deployment([file]) if one.status != "ok"]
