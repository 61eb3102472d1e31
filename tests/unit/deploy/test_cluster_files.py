"""`graphpool doctor deploy` on cluster files of `ray up`: each mistake is found, at its line, with what to write instead."""

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

AWS, GCP, LOCAL = (ROOT / "deploy" / "ray-up" / f"{name}.yaml" for name in ("aws", "gcp", "on-premises"))
HEAD = "head_start_ray_commands"

Change = Callable[[dict[str, Any]], object]


def check(tmp_path: Path, source: Path, change: Change) -> tuple[list[Finding], list[str]]:
    """Findings about a shipped file after `change`, and its lines."""
    values = yaml.safe_load(source.read_text())
    change(values)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False, width=1000))
    return check_deployment([file]), file.read_text().splitlines()


def set_in(*path: Any) -> Change:
    """Put the last of these where the others lead."""
    *way, name, value = path

    def change(values: dict[str, Any]) -> None:
        place: Any = values
        for step in way:
            place = place[step]
        place[name] = value

    return change


def without(*path: Any) -> Change:
    *way, name = path

    def change(values: dict[str, Any]) -> None:
        place: Any = values
        for step in way:
            place = place[step]
        del place[name]

    return change


def start(text: str) -> Change:
    return set_in(HEAD, [text])


def no_gpus(values: dict[str, Any]) -> None:
    for name in ("gpu", "router"):
        values["available_node_types"][name].update(resources={}, node_config={"InstanceType": "m7i.xlarge"})


def open_port(first: int, last: int) -> Change:
    rule = {"FromPort": first, "ToPort": last, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    return set_in("provider", "security_group", "IpPermissions", 0, rule)


TOKEN_START = "RAY_AUTH_MODE=token ray start --head --num-cpus=0"
TYPES = "available_node_types"

MISTAKES = [
    # file, change, text of the line it is reported for, part of the reason, part of the remedy
    (AWS, no_gpus, "available_node_types:", "no node type has a GPU", "GPU: 1"),
    (AWS, start(f"{TOKEN_START} --dashboard-host=0.0.0.0"), "0.0.0.0", "whoever reaches it can run code", "--dashboard-host=127.0.0.1"),
    (AWS, without(HEAD), "", "opens the dashboard to everybody", "--dashboard-host=127.0.0.1"),
    (AWS, open_port(6379, 6379), "FromPort: 6379", "open to the whole internet", "50050 alone"),
    (AWS, open_port(0, 65535), "FromPort: 0", "open to the whole internet", "50050 alone"),
    (AWS, set_in(TYPES, "gpu", "min_workers", 5), "min_workers: 5", "min_workers 5 is more than max_workers 4", "min_workers: 4"),
    (AWS, set_in("max_workers", 0), "max_workers: 0", "more than max_workers 0", "max_workers: 1"),
    (AWS, start("ray start --head --num-cpus=0 --dashboard-host=127.0.0.1"), "ray start --head", "without token authentication", "RAY_AUTH_MODE=token"),
    (AWS, without("file_mounts", "~/.ray/auth_token"), "file_mounts:", "no token reaches the nodes", "ray get-auth-token"),
    (AWS, set_in("docker", {"image": "rayproject/ray:latest", "container_name": "ray"}), "rayproject/ray:latest", "moves", "digest"),
    (AWS, set_in("docker", {"image": "rayproject/ray", "container_name": "ray"}), "rayproject/ray", "no tag", "VERSION"),
    (AWS, set_in("setup_commands", ["pip install 'ray[serve]'"]), "pip install", "not pinned", "ray[serve]=="),
    (AWS, without("setup_commands"), "", "nightly build", "setup.sh"),
    (
        AWS,
        set_in("docker", {"head_image": "rayproject/ray:2.60.0-gpu", "worker_image": "rayproject/ray:2.59.0-gpu", "container_name": "ray"}),
        "worker_image: rayproject/ray:2.59.0",
        "Ray 2.59.0 here, but 2.60.0 on the head",
        "same version on all",
    ),
    (AWS, lambda v: v.update(head_setup_commands=["pip install ray==2.60.0"], worker_setup_commands=["pip install ray==2.58.0"]), "2.58.0", "2.60.0 on the head", "2.60.0"),
    (AWS, set_in("setup_commands", ["export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz && true"]), "HF_TOKEN", "plain text", "replace this secret"),
    (AWS, set_in("max_wokers", 3), "max_wokers", "max_wokers", "reference"),
    (AWS, set_in("head_node_type", "heads"), "", "head_node_type", "reference"),
    (AWS, set_in(TYPES, "gpu", "resources", "GPU", 0.5), "GPU: 0.5", "0.5", "reference"),
    (GCP, start(f"{TOKEN_START} --dashboard-host=::"), "--dashboard-host=::", "run code", "127.0.0.1"),
    (LOCAL, start(f"{TOKEN_START} --dashboard-host=127.0.0.1"), "ray start --head", "never starts the workers", "RAY_enable_autoscaler_v2=0"),
    (LOCAL, set_in("provider", "worker_ips", ["10.0.0.11", "10.0.0.11"]), "- 10.0.0.11", "there twice", "each address once"),
    (LOCAL, set_in("worker_start_ray_commands", ["RAY_AUTH_MODE=token ray start --num-gpus=0"]), "--num-gpus=0", "hide their GPUs", "leave --num-gpus out"),
    (LOCAL, set_in("min_workers", 9), "max_workers: 2", "more than max_workers 2", "max_workers: 9"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "change", "line", "reason", "remedy"), MISTAKES)
def test_a_mistake_is_explained_where_it_is(
    tmp_path: Path, source: Path, change: Change, line: str, reason: str, remedy: str
) -> None:
    findings, lines = check(tmp_path, source, change)
    assert_explained(findings, lines, line=line, reason=reason, remedy=remedy)


WARNINGS = [
    (AWS, without("max_workers"), "no limit on the number of nodes"),
    (AWS, without(TYPES, "gpu", "max_workers"), "may grow to the whole cluster's limit"),
    (AWS, open_port(50050, 50050), "the whole internet may call the router"),
    (AWS, lambda v: v[TYPES]["head"].update(resources={"CPU": 4}) or v.update({HEAD: [f"{TOKEN_START[:-13]}"]}), "replicas may be placed on the head"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "change", "reason"), WARNINGS)
def test_what_works_less_well_is_a_warning(tmp_path: Path, source: Path, change: Change, reason: str) -> None:
    findings, _ = check(tmp_path, source, change)
    assert any(one.status == "warn" and reason in one.detail for one in findings), findings


def test_a_secret_is_not_repeated(tmp_path: Path) -> None:
    findings, _ = check(tmp_path, AWS, set_in("setup_commands", ["export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz"]))
    assert not any("hf_abc" in f"{one.detail}{one.remedy}" for one in findings)


@pytest.mark.parametrize("source", [AWS, GCP, LOCAL])
def test_a_shipped_file_has_no_mistake(source: Path) -> None:
    assert not [one for one in check_deployment([source]) if one.status == "fail"]


def test_an_unknown_gpu_machine_gets_the_benefit_of_the_doubt(tmp_path: Path) -> None:
    findings, _ = check(
        tmp_path, AWS, lambda v: v[TYPES]["gpu"].update(resources={}, node_config={"InstanceType": "p6.48xlarge"})
    )
    assert not any("GPU" in one.detail for one in findings)


def test_replicas_are_held_against_the_nodes_of_another_file(tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "deploy/serve/pool.yaml").read_text())
    values["applications"][0]["args"]["num_gpus"] = 2
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(values))
    findings = check_deployment([AWS, tmp_path / "pool.yaml"])
    (found,) = (one for one in findings if "no node has more than 1" in one.detail)
    assert found.check.startswith("pool.yaml line ")


def test_more_replicas_than_all_nodes_together_have_gpus_for_is_a_mistake(tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "deploy/serve/pool.yaml").read_text())
    values["applications"][0]["args"]["scaling"]["max_replicas"] = 5
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(values))
    findings = check_deployment([AWS, tmp_path / "pool.yaml"])
    assert [one for one in findings if "5 GPUs together, but the nodes have 4 at most" in one.detail]


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({"surge": True}, True),
        ({"surge": True, "scaling": None, "num_replicas": 4}, True),
        ({"surge": True, "scaling": {"max_replicas": 3}}, False),
        ({"surge": True, "num_gpus": 0.5, "scaling": {"max_replicas": 7}}, False),
        ({"surge": True, "num_gpus": 0.5, "scaling": {"max_replicas": 8}}, True),
        ({"surge": True, "num_gpus": 0}, False),
        ({"surge": False}, False),
        ({}, False),
    ],
    ids=str,
)
def test_successors_without_a_place_beside_what_they_replace_are_a_warning(
    tmp_path: Path, changes: dict[str, Any], is_warned: bool
) -> None:
    values = yaml.safe_load((ROOT / "deploy/serve/pool.yaml").read_text())
    values["applications"][0]["args"] |= changes
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(values))
    findings = [one for one in check_deployment([AWS, tmp_path / "pool.yaml"]) if "successor" in one.detail]
    assert [one.status for one in findings] == ["warn"] * is_warned
