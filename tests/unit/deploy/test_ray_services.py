"""`graphpool doctor deploy` on KubeRay's manifests."""

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

FOLDER = ROOT / "deploy" / "kubernetes"

Change = Callable[[dict[str, Any]], object]


def check(tmp_path: Path, change: Change) -> tuple[list[Finding], list[str]]:
    """Findings about rayservice.yaml after a change, and its lines."""
    values = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    change(values["spec"])
    file = tmp_path / "rayservice.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False, width=1000, default_style=None))
    return check_deployment([file, FOLDER / "router.yaml"]), file.read_text().splitlines()


def cluster(change: Change) -> Change:
    return lambda spec: change(spec["rayClusterConfig"])


def group(change: Change) -> Change:
    return lambda spec: change(spec["rayClusterConfig"]["workerGroupSpecs"][0])


def container(change: Change) -> Change:
    return group(lambda values: change(values["template"]["spec"]["containers"][0]))


def served(old: str, new: str) -> Change:
    return lambda spec: spec.update(serveConfigV2=spec["serveConfigV2"].replace(old, new))


MISTAKES = [
    # change, text of the line it is reported for, part of the reason, part of the remedy
    (cluster(lambda v: v.pop("authOptions")), "rayClusterConfig:", "without token authentication", "mode: token"),
    (cluster(lambda v: v.update(rayVersion="2.59.0")), "image:", "Ray 2.60.0 here, but 2.59.0 on the head", "Ray 2.59.0"),
    (cluster(lambda v: v.pop("rayVersion")), "rayClusterConfig:", "no rayVersion", "rayVersion"),
    (container(lambda v: v.update(image="rayproject/ray:nightly-gpu")), "nightly", "moves", "digest"),
    (container(lambda v: v["resources"].pop("limits")), "resources:", "no limit of cpu and memory", "resources.limits"),
    (container(lambda v: v["resources"]["limits"].pop("nvidia.com/gpu")), "workerGroupSpecs:", "no worker pod has a GPU", "nvidia.com/gpu"),
    (container(lambda v: v.pop("readinessProbe")), "name: ray-worker", "never becomes ready", "readinessProbe"),
    (container(lambda v: v["env"].append({"name": "HF_TOKEN", "value": "secret-0123456789"})), "value: secret", "plain text", "Kubernetes Secret"),
    (group(lambda v: v.update(minReplicas=9)), "minReplicas: 9", "minReplicas 9 is more than maxReplicas 4", "minReplicas: 4"),
    (group(lambda v: v["template"]["spec"].update(terminationGracePeriodSeconds=60)), "terminationGracePeriodSeconds: 60", "kills a pod after 60 s", "330"),
    (group(lambda v: v["template"]["spec"].pop("terminationGracePeriodSeconds")), "spec:", "kills a pod after 30 s", "330"),
    (lambda v: v.pop("serveConfigV2"), "spec:", "no Serve config", "serveConfigV2: |"),
    (served("num_gpus: 1", "num_gpus: 2"), "", "no node has more than 1", "num_gpus: 1"),
    (served("route_prefix: null", "route_prefix: /"), "", "HTTP route", "route_prefix: null"),
    (served("drain_timeout_s: 300", "drain_timeout_s: 10"), "", "would be cut off", "drain_timeout_s: 90"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line", "reason", "remedy"), MISTAKES)
def test_a_mistake_is_explained_where_it_is(
    tmp_path: Path, change: Change, line: str, reason: str, remedy: str
) -> None:
    findings, lines = check(tmp_path, change)
    assert_explained(findings, lines, line=line, reason=reason, remedy=remedy)


def test_a_mistake_inside_the_serve_config_has_the_manifests_line(tmp_path: Path) -> None:
    text = (FOLDER / "rayservice.yaml").read_text().replace("num_gpus: 1", "num_gpus: 7")
    (tmp_path / "rayservice.yaml").write_text(text)
    findings = check_deployment([tmp_path / "rayservice.yaml"])
    numbers = {int(one.check.split("line ")[1].split(":")[0]) for one in findings if "num_gpus" in one.check}
    assert [text.splitlines()[number - 1].strip() for number in numbers] == ["num_gpus: 7"]


def test_a_port_of_rays_in_a_load_balancer_is_a_mistake(tmp_path: Path) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80, "targetPort": 8265}]},
    }
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(service))
    (found,) = (one for one in check_deployment([tmp_path / "service.yaml"]) if one.status == "fail")
    assert "open to the outside" in found.detail


def test_a_manifest_without_a_network_policy_is_a_warning() -> None:
    alone = check_deployment([FOLDER / "rayservice.yaml"])
    together = check_deployment([FOLDER / "rayservice.yaml", FOLDER / "router.yaml"])
    assert [any("no NetworkPolicy" in one.detail for one in findings) for findings in (alone, together)] == [
        True,
        False,
    ]


def test_the_shipped_files_have_no_mistake() -> None:
    findings = check_deployment([FOLDER / "rayservice.yaml", FOLDER / "router.yaml"])
    assert {one.status for one in findings} == {"warn"}
    assert all("stands for a value of yours" in one.detail for one in findings)
