"""Rules for the cluster files of `ray up`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.deploy.document import Document
from cluster.doctor.deploy.document import Path as Place
from cluster.doctor.deploy.images import image_findings, install_findings, version_findings
from cluster.doctor.deploy.schemas import cluster_schema_findings
from cluster.doctor.finding import Finding

HEAD, WORKERS = "head_start_ray_commands", "worker_start_ray_commands"
SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
IMAGES = ("image", "head_image", "worker_image")
ROUTER_PORT = 50050
ANYBODY = ("0.0.0.0/0", "::/0")
_GPU_MACHINES = re.compile(r"^(g[3-9]\w*|p[2-9]\w*|gr6\w*)\.|^(a2|a3|a4|g2|g4)-")
_TOKEN_FILE = re.compile(r"\.ray/auth_token$")


def cluster_findings(document: Document, folder: Path) -> Iterator[Finding]:
    """All of them. `folder` is what local paths of the file are relative to."""
    yield from cluster_schema_findings(document)
    yield from _gpus(document)
    yield from _node_counts(document)
    yield from _dashboard(document, folder)
    yield from _token(document, folder)
    yield from _security_group(document)
    yield from _versions(document)
    yield from _head_work(document)
    if document.get("provider", "type") == "local":
        yield from _local(document, folder)


def gpu_nodes(document: Document) -> list[tuple[float | None, object]]:
    """Of each type of worker: GPUs of one node, None where the file leaves it to the machine; and its max_workers."""
    types = document.mapping("available_node_types")
    names = [name for name in types if name != document.get("head_node_type")]
    return [(_gpus_of(document, name), document.get("available_node_types", name, "max_workers")) for name in names]


def _gpus_of(document: Document, name: str) -> float | None:
    declared = document.get("available_node_types", name, "resources", "GPU")
    if declared is not None:
        return float(declared) if isinstance(declared, (int, float)) else None
    config = document.mapping("available_node_types", name, "node_config")
    if isinstance(accelerators := config.get("guestAccelerators"), list):
        counts = [entry.get("acceleratorCount", 1) for entry in accelerators if isinstance(entry, dict)]
        return float(sum(count for count in counts if isinstance(count, int)))
    machine = str(config.get("InstanceType") or config.get("machineType") or "")
    return None if _GPU_MACHINES.search(machine.rpartition("/")[2]) or not machine else 0.0


def _gpus(document: Document) -> Iterator[Finding]:
    if document.get("provider", "type") == "local":
        for index, command in enumerate(document.items(WORKERS)):
            if re.search(r"--num-gpus[= ]0\b", str(command)):
                yield document.find(
                    "fail",
                    (WORKERS, index),
                    "the workers hide their GPUs from Ray",
                    "leave --num-gpus out: Ray counts them",
                )
        return
    if not any(gpus is None or gpus > 0 for gpus, _ in gpu_nodes(document)):
        yield document.find(
            "fail", ("available_node_types",), "no node type has a GPU, so no replica that asks for one is ever placed",
            "a worker type with a GPU machine (AWS g6.xlarge, GCP g2-standard-8) and resources: {GPU: 1}",
        )  # fmt: skip


def _node_counts(document: Document) -> Iterator[Finding]:
    total = document.get("max_workers")
    is_local = document.get("provider", "type") == "local"
    if total is None and not is_local:
        yield document.find(
            "warn",
            ("max_workers",),
            "no limit on the number of nodes is set; Ray takes 2",
            "max_workers: the most you want to pay for",
        )
    smallest = 0
    for name, values in document.mapping("available_node_types").items():
        if not isinstance(values, dict) or name == document.get("head_node_type"):
            continue
        path = ("available_node_types", name)
        least, most = values.get("min_workers", 0), values.get("max_workers")
        smallest += least if isinstance(least, int) else 0
        if most is None:
            yield document.find(
                "warn",
                path,
                "the type has no max_workers: it may grow to the whole cluster's limit",
                "max_workers: a number for this type",
            )
        elif isinstance(least, int) and isinstance(most, int) and least > most:
            yield document.find(
                "fail",
                (*path, "min_workers"),
                f"min_workers {least} is more than max_workers {most}",
                f"min_workers: {most}, or a larger max_workers",
            )
    if is_local:
        smallest = document.get("min_workers", default=0)
    if isinstance(total, int) and isinstance(smallest, int) and smallest > total:
        yield document.find(
            "fail",
            ("max_workers",),
            f"the nodes that must be there are {smallest}, more than max_workers {total}",
            f"max_workers: {smallest} or more",
        )


def _dashboard(document: Document, folder: Path) -> Iterator[Finding]:
    remedy = "--dashboard-host=127.0.0.1 in head_start_ray_commands; `ray dashboard FILE` brings it to your machine"
    if not document.items(HEAD):
        if document.get("provider", "type") != "local":
            yield document.find(
                "fail",
                (HEAD,),
                "Ray's own start command is used, which opens the dashboard to everybody, and with it the way to run code",
                remedy,
            )
        return
    for index, command in enumerate(document.items(HEAD)):
        if re.search(r"--dashboard-host[= ]['\"]?(0\.0\.0\.0|::|\*)", _with_sourced(document, str(command), folder)):
            yield document.find(
                "fail", (HEAD, index), "the dashboard answers on every address: whoever reaches it can run code", remedy
            )


def _token(document: Document, folder: Path) -> Iterator[Finding]:
    for commands in (HEAD, WORKERS):
        starts = [(index, str(text)) for index, text in enumerate(document.items(commands)) if "ray start" in str(text)]
        for index, text in starts or [(-1, "")]:
            if not re.search(r"RAY_AUTH_MODE=['\"]?token", _with_sourced(document, text, folder)):
                path = (commands, index) if index >= 0 else (commands,)
                yield document.find(
                    "fail", path, "Ray starts without token authentication: whoever reaches its ports can run code",
                    "export RAY_AUTH_MODE=token before `ray start`, as deploy/node/ray.env does",
                )  # fmt: skip
    if not any(_TOKEN_FILE.search(str(remote)) for remote in document.mapping("file_mounts")):
        yield document.find(
            "fail", ("file_mounts",), "no token reaches the nodes, so their Ray cannot ask for one",
            "~/.ray/auth_token: ~/.ray/auth_token under file_mounts, after `ray get-auth-token --generate`",
        )  # fmt: skip


def _with_sourced(document: Document, command: str, folder: Path) -> str:
    """The command, and the files of this project that it reads before."""
    texts = [command]
    for remote in re.findall(r"(?:source|\.) (\S+)", command):
        for mounted, local in document.mapping("file_mounts").items():
            if remote == mounted or remote.startswith(f"{mounted}/"):
                file = folder / Path(str(local)).expanduser() / remote[len(mounted) :].lstrip("/")
                texts += [file.read_text(encoding="utf-8")] if file.is_file() else []
    return "\n".join(texts)


def _security_group(document: Document) -> Iterator[Finding]:
    base = ("provider", "security_group", "IpPermissions")
    for index, rule in enumerate(document.items(*base)):
        if not isinstance(rule, dict):
            continue
        first, last = rule.get("FromPort", 0), rule.get("ToPort", 65535)
        is_open = any(value in ANYBODY for path, value in document.scalars() if path[: len(base) + 1] == (*base, index))
        if not is_open or (first, last) == (22, 22):
            continue
        if (first, last) == (ROUTER_PORT, ROUTER_PORT):
            yield document.find(
                "warn",
                (*base, index),
                "the whole internet may call the router",
                "your clients' addresses; certificates and tokens on the router in any case",
            )
        else:
            yield document.find(
                "fail", (*base, index), f"ports {first} to {last} are open to the whole internet, where Ray's own ports let anybody run code",
                f"the router's port {ROUTER_PORT} alone, for your clients' addresses; nodes reach each other without a rule",
            )  # fmt: skip


def _versions(document: Document) -> Iterator[Finding]:
    images = list(_images(document))
    commands: list[tuple[Place, str]] = [
        ((key, index), str(text)) for key in SETUP for index, text in enumerate(document.items(key))
    ]
    for path, image in images:
        yield from image_findings(document, path, image)
    for path, command in commands:
        yield from install_findings(document, path, command)
    if not images and "setup_commands" not in document.values and document.get("provider", "type") != "local":
        yield document.find(
            "fail", ("setup_commands",), "Ray's own set-up is used, which installs a nightly build of Ray",
            "setup_commands that install pinned versions, as deploy/node/setup.sh does, or a pinned docker.image",
        )  # fmt: skip
    places = images + commands
    head = [place for place in places if not _is_workers(place[0])]
    yield from version_findings(document, head, [place for place in places if _is_workers(place[0])])


def _images(document: Document) -> Iterator[tuple[Place, str]]:
    places: list[Place] = [("docker", key) for key in IMAGES]
    places += [
        ("available_node_types", name, "docker", "worker_image") for name in document.mapping("available_node_types")
    ]
    for place in places:
        if image := document.get(*place):
            yield place, str(image)


def _is_workers(place: Place) -> bool:
    return "worker" in str(place[0]) or place[-1] == "worker_image"


def _head_work(document: Document) -> Iterator[Finding]:
    name = document.get("head_node_type")
    declared = document.get("available_node_types", name, "resources", "CPU") if name else None
    starts = [str(command) for command in document.items(HEAD) if "ray start" in str(command)]
    if declared != 0 and starts and not any(re.search(r"--num-cpus[= ]0\b", start) for start in starts):
        yield document.find(
            "warn", (HEAD,), "replicas may be placed on the head; when its memory runs out, Ray's own processes die with them",
            "--num-cpus=0 for the head's `ray start`, and resources: {CPU: 0} for its node type",
        )  # fmt: skip


def _local(document: Document, folder: Path) -> Iterator[Finding]:
    addresses = document.items("provider", "worker_ips")
    for index, address in enumerate(addresses):
        if address in addresses[:index] or address == document.get("provider", "head_ip"):
            yield document.find(
                "fail",
                ("provider", "worker_ips", index),
                f"{address} is there twice; one machine runs one node",
                "each address once, the head's only as head_ip",
            )
    starts = [
        (index, _with_sourced(document, str(text), folder))
        for index, text in enumerate(document.items(HEAD))
        if "ray start" in str(text)
    ]
    for index, text in starts:
        if "RAY_enable_autoscaler_v2=0" not in text:
            yield document.find(
                "fail", (HEAD, index), "Ray's newer autoscaler, the default, never starts the workers of a local provider",
                "export RAY_enable_autoscaler_v2=0 before the head's `ray start`",
            )  # fmt: skip
