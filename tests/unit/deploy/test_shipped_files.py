"""The files of deploy/ are what Ray, Kubernetes, Docker, systemd and our own command line take."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from cluster.cli.app import app
from cluster.serve_app import actor_options, pool_config
from tests.fakes.command_line import ROOT

DEPLOY = ROOT / "deploy"
CLUSTERS = sorted((DEPLOY / "ray-up").glob("*.yaml"))
SERVE = sorted((DEPLOY / "serve").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "node").iterdir())
PINNED_RAY = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
DOCKER_INSTRUCTIONS = {"FROM", "RUN", "ENV", "COPY", "ARG", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}


def name_of(path: Path) -> str:
    return path.name


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def ray_service() -> Any:
    return loaded(DEPLOY / "kubernetes" / "rayservice.yaml")["spec"]


def parse_command(words: list[str]) -> None:
    """Let our command line read `graphpool ...` without running it: unknown options and wrong values raise."""
    assert Path(words[0]).name == "graphpool"
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])


@pytest.mark.parametrize("path", CLUSTERS, ids=name_of)
def test_ray_takes_a_cluster_file(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(loaded(path)))
    validate_config(prepared)
    assert not any("0.0.0.0" in command for command in prepared["head_start_ray_commands"])


@pytest.mark.parametrize("path", CLUSTERS, ids=name_of)
def test_what_a_cluster_file_copies_is_there(path: Path) -> None:
    copied = loaded(path)["file_mounts"].values()
    # `make wheel` makes dist; the others lie in the operator's home.
    here = [place for place in copied if not place.startswith("~") and place != "dist"]
    assert here
    assert all((ROOT / place).exists() for place in here)


@pytest.mark.parametrize("path", CLUSTERS, ids=name_of)
def test_the_scripts_that_a_cluster_file_names_are_there(path: Path) -> None:
    values = loaded(path)
    named = re.findall(
        r"~/graphpool/(deploy/[\w/.-]+)", str({key: values[key] for key in values if key.endswith("commands")})
    )
    assert len(named) >= 4
    assert all((ROOT / place).is_file() for place in named)


@pytest.mark.parametrize("path", SERVE, ids=name_of)
def test_ray_serve_and_the_application_take_a_config(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(copy.deepcopy(loaded(path)))
    for application in loaded(path)["applications"]:
        pool_config(application["args"])


def test_fractions_and_cpus_reach_rays_actor_options() -> None:
    whole, half = (pool_config(one["args"]) for one in loaded(DEPLOY / "serve" / "several-models.yaml")["applications"])
    (cpu,) = (pool_config(one["args"]) for one in loaded(DEPLOY / "serve" / "cpu.yaml")["applications"])
    assert [actor_options(config)["num_gpus"] for config in (whole, half, cpu)] == [1, 0.5, 0]


def test_serve_takes_the_config_inside_the_manifest() -> None:
    from ray.serve.schema import ServeDeploySchema

    values = yaml.safe_load(ray_service()["serveConfigV2"])
    ServeDeploySchema.model_validate(copy.deepcopy(values))
    pool_config(values["applications"][0]["args"])


def test_the_manifests_parts_fit_together() -> None:
    cluster = ray_service()["rayClusterConfig"]
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]
    args = yaml.safe_load(ray_service()["serveConfigV2"])["applications"][0]["args"]
    volumes = {volume["name"]: volume for volume in worker["volumes"]}
    (mount,) = (mount for mount in worker["containers"][0]["volumeMounts"] if mount["name"] == "certs")
    assert volumes["certs"]["secret"]["secretName"] == "graphpool-certs"
    assert all(path.startswith(f"{mount['mountPath']}/") for path in args["replica"]["security"].values())
    assert worker["terminationGracePeriodSeconds"] > args["drain_timeout_s"]
    assert PINNED_RAY is not None
    assert cluster["rayVersion"] == PINNED_RAY[1]
    images = {
        container["image"]
        for spec in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])
        for container in spec["template"]["spec"]["containers"]
    }
    assert all(image.endswith(f"-ray{PINNED_RAY[1]}") for image in images)


def test_the_routers_of_the_manifest_are_those_that_replicas_announce_to() -> None:
    documents = {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "router.yaml").read_text())
    }
    routers = documents["StatefulSet", "graphpool-router"]["spec"]
    service = documents["Service", routers["serviceName"]]
    expected = [
        f"graphpool-router-{number}.{service['metadata']['name']}:50050" for number in range(routers["replicas"])
    ]
    args = yaml.safe_load(ray_service()["serveConfigV2"])["applications"][0]["args"]
    assert args["replica"]["routers"] == expected
    labels = routers["template"]["metadata"]["labels"]
    assert routers["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == documents["Service", "graphpool-router"]["spec"]["selector"] == labels
    container = routers["template"]["spec"]["containers"][0]
    parse_command([*container["command"], *container["args"]])
    parse_command(container["readinessProbe"]["exec"]["command"])


@pytest.mark.parametrize("path", UNITS, ids=name_of)
def test_our_command_line_takes_a_units_command(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    entries = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w+=", line))
    parse_command(shlex.split(re.sub(r"%\w", "0", entries["ExecStart"])))
    assert int(entries["TimeoutStopSec"]) > int(re.search(r"--drain-s (\d+)", entries["ExecStart"])[1])  # type: ignore[index]
    sections = re.findall(r"^\[(\w+)\]$", text, re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=name_of)
def test_systemd_takes_a_unit(path: Path, tmp_path: Path) -> None:
    text = path.read_text().replace("/opt/graphpool/bin/graphpool", "/bin/true").replace("User=graphpool", "User=root")
    unit = tmp_path / path.name.replace("@", "@0")
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_our_command_line_takes_the_routers_options() -> None:
    script = f"source {DEPLOY}/node/router.env; printf '%s\\n' \"${{ROUTER_OPTIONS[@]}}\"; echo; printf '%s\\n' \"${{CLIENT_OPTIONS[@]}}\""
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    router, client = done.stdout.split("\n\n")
    parse_command(["graphpool", "router", *router.split()])
    parse_command(["graphpool", "status", *client.split()])


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_is_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_dockerfile_can_be_read_and_pins_what_it_takes() -> None:
    """Nothing here builds it: its instructions, sources and commands are looked at one by one."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    assert {name for name, _ in steps} <= DOCKER_INSTRUCTIONS
    assert steps[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.1[1-3]\.\d+-slim-\w+(@sha256:\w+)?", steps[0][1])
    for name, rest in steps:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if name == "COPY":
            source = rest.split()[0]
            assert source == "dist/graphpool-*.whl" or (ROOT / source).exists()
        if name in ("ENTRYPOINT", "CMD"):
            words = yaml.safe_load(rest)
            assert words[0] in ("tini", "graphpool")
            if words[0] == "graphpool":
                parse_command(words)
    assert [rest for name, rest in steps if name == "USER"][-1] != "root"


@pytest.mark.parametrize(
    "path",
    [
        *(
            path
            for name in ("ray-up", "serve", "kubernetes", "systemd", "firewall")
            for path in (DEPLOY / name).iterdir()
        ),
        DEPLOY / "Dockerfile",
    ],
    ids=name_of,
)
def test_a_file_says_what_to_change(path: Path) -> None:
    assert "CHANGE" in path.read_text()
