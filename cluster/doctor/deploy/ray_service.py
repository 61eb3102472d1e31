"""Rules for KubeRay's manifests: a RayService or RayCluster, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.doctor.deploy.document import Document, Path, read_documents
from cluster.doctor.deploy.images import image_findings, version_findings
from cluster.doctor.deploy.serve_config import placement_findings, serve_findings
from cluster.doctor.finding import Finding

GPU = "nvidia.com/gpu"
RAY_PORTS = (6379, 8265, 10001, 52365)
STOP_MARGIN_S = 5.0


def ray_service_findings(document: Document, step_ms: float | None = None) -> Iterator[Finding]:
    """All of them, those about the Serve config inside included."""
    path = cluster_path(document)
    yield from _structure(document, path)
    yield from _token(document, path)
    yield from _images(document, path)
    yield from _pods(document, path)
    yield from _groups(document, path)
    inner = serve_document(document)
    if inner is not None:
        yield from serve_findings(inner, step_ms)
        yield from _fits_pods(document, path, inner)


def manifest_findings(documents: list[Document]) -> Iterator[Finding]:
    """Rules about everything that the file holds beside the RayService."""
    for document in documents:
        if document.get("kind") == "Service" and document.get("spec", "type") in ("LoadBalancer", "NodePort"):
            for index, port in enumerate(document.items("spec", "ports")):
                if isinstance(port, dict) and {port.get("port"), port.get("targetPort")} & set(RAY_PORTS):
                    yield document.find(
                        "fail",
                        ("spec", "ports", index),
                        "one of Ray's own ports is open to the outside: whoever reaches it can run code",
                        "kubectl port-forward, for as long as it is needed",
                    )
    rays = [document for document in documents if is_ray(document)]
    if rays and not any(document.get("kind") == "NetworkPolicy" for document in documents):
        yield rays[0].find(
            "warn",
            ("kind",),
            "no NetworkPolicy stands in this file: every pod of the Kubernetes cluster may reach Ray's ports",
            "the policies of deploy/kubernetes/router.yaml; check both files in one call",
        )


def is_ray(document: Document) -> bool:
    """Whether KubeRay reads it."""
    return str(document.get("apiVersion", default="")).startswith("ray.io/") and document.get("kind") in (
        "RayService",
        "RayCluster",
    )


def cluster_path(document: Document) -> Path:
    """Where the cluster's part is."""
    return ("spec", "rayClusterConfig") if document.get("kind") == "RayService" else ("spec",)


def serve_document(document: Document) -> Document | None:
    """The Serve config inside a RayService; None when it is missing or no YAML."""
    text = document.get("spec", "serveConfigV2")
    if not isinstance(text, str):
        return None
    try:
        (inner,) = read_documents(text, document.file)
    except ValueError:
        return None
    return inner.moved(document.line(("spec", "serveConfigV2")), "serveConfigV2")


def pod_gpus(document: Document) -> list[float]:
    """GPUs of one pod of each worker group."""
    path = (*cluster_path(document), "workerGroupSpecs")
    return [_gpus(document, (*path, index)) for index in range(len(document.items(*path)))]


def _structure(document: Document, path: Path) -> Iterator[Finding]:
    if document.get("kind") == "RayService" and serve_document(document) is None:
        yield document.find(
            "fail",
            ("spec", "serveConfigV2"),
            "there is no Serve config, or it is no YAML",
            "serveConfigV2: | and below it what deploy/serve/pool.yaml holds",
        )
    for name in ("headGroupSpec", "workerGroupSpecs"):
        if not document.get(*path, name):
            yield document.find("fail", path, f"there is no {name}", "see deploy/kubernetes/rayservice.yaml")
    if not document.get(*path, "rayVersion"):
        yield document.find(
            "fail",
            path,
            "there is no rayVersion: the operator has to guess how to speak to this Ray",
            'rayVersion: "2.60.0", that of the image',
        )


def _token(document: Document, path: Path) -> Iterator[Finding]:
    if document.get(*path, "authOptions", "mode") != "token":
        yield document.find(
            "fail", (*path, "authOptions"), "Ray starts without token authentication: whichever pod reaches its ports can run code",
            "authOptions: {mode: token}; KubeRay makes the token",
        )  # fmt: skip


def _containers(document: Document, path: Path) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Each container of the head and of the workers, and whether it is a worker's."""
    groups: list[tuple[Path, bool]] = [((*path, "headGroupSpec"), False)]
    groups += [
        ((*path, "workerGroupSpecs", index), True) for index in range(len(document.items(*path, "workerGroupSpecs")))
    ]
    for group, is_worker in groups:
        place = (*group, "template", "spec", "containers")
        for index, container in enumerate(document.items(*place)):
            if isinstance(container, dict):
                yield (*place, index), container, is_worker


def _images(document: Document, path: Path) -> Iterator[Finding]:
    version = str(document.get(*path, "rayVersion", default=""))
    images = [
        ((*place, "image"), str(container.get("image", "")), is_worker)
        for place, container, is_worker in _containers(document, path)
    ]
    for place, image, _ in images:
        yield from image_findings(document, place, image)
    head = [((*path, "rayVersion"), f"ray:{version}")]
    yield from version_findings(document, head, [(place, _as_ray(image)) for place, image, _ in images])


def _as_ray(image: str) -> str:
    """Our images say which Ray is in them behind "-ray"."""
    return f"ray:{image.rpartition('-ray')[2]}" if "-ray" in image else image


def _pods(document: Document, path: Path) -> Iterator[Finding]:
    inner = serve_document(document)
    proxies = "EveryNode" if inner is None else inner.get("proxy_location", default="EveryNode")
    for place, container, is_worker in _containers(document, path):
        limits = document.mapping(*place, "resources", "limits")
        lacking = [name for name in ("cpu", "memory") if name not in limits]
        if lacking:
            yield document.find(
                "fail", (*place, "resources"), f"no limit of {' and '.join(lacking)}: Ray counts the whole machine as its own, and the pod is the first to be evicted",
                "resources.limits with cpu and memory, and equal requests",
            )  # fmt: skip
        if is_worker and proxies != "EveryNode" and "readinessProbe" not in container:
            yield document.find(
                "fail", place, "KubeRay's own readiness probe asks Serve's proxy, which is off: the pod never becomes ready",
                "a readinessProbe of its own, as in deploy/kubernetes/rayservice.yaml",
            )  # fmt: skip


def _groups(document: Document, path: Path) -> Iterator[Finding]:
    base = (*path, "workerGroupSpecs")
    for index in range(len(document.items(*base))):
        least, most = document.get(*base, index, "minReplicas"), document.get(*base, index, "maxReplicas")
        if not isinstance(most, int):
            yield document.find(
                "warn",
                (*base, index),
                "the group has no maxReplicas: nothing bounds how far it grows",
                "maxReplicas: a number",
            )
        elif isinstance(least, int) and least > most:
            yield document.find(
                "fail",
                (*base, index, "minReplicas"),
                f"minReplicas {least} is more than maxReplicas {most}",
                f"minReplicas: {most}, or a larger maxReplicas",
            )
    if document.items(*base) and not any(pod_gpus(document)):
        yield document.find(
            "fail",
            base,
            "no worker pod has a GPU, so no replica that asks for one is ever placed",
            f"{GPU}: 1 in a worker's resources.limits",
        )


def _gpus(document: Document, group: Path) -> float:
    place = (*group, "template", "spec", "containers")
    limits = [document.get(*place, index, "resources", "limits", GPU) for index in range(len(document.items(*place)))]
    # Kubernetes takes "1" for 1.
    return float(sum(int(limit) for limit in limits if str(limit).isdecimal()))


def _fits_pods(document: Document, path: Path, inner: Document) -> Iterator[Finding]:
    groups = document.items(*path, "workerGroupSpecs")
    most = [group.get("maxReplicas") if isinstance(group, dict) else None for group in groups]
    yield from placement_findings(inner, list(zip(pod_gpus(document), most, strict=True)))
    for index, application in enumerate(inner.items("applications")):
        grace_s = inner.get("applications", index, "args", "drain_timeout_s", default=120.0)
        if not isinstance(application, dict) or not isinstance(grace_s, (int, float)):
            continue
        for number in range(len(document.items(*path, "workerGroupSpecs"))):
            place = (*path, "workerGroupSpecs", number, "template", "spec", "terminationGracePeriodSeconds")
            stop_s = document.get(*place, default=30)
            if isinstance(stop_s, (int, float)) and stop_s < grace_s + STOP_MARGIN_S:
                yield document.find(
                    "fail", place, f"Kubernetes kills a pod after {stop_s} s, while its replica may take {grace_s:g} s to finish its answers",
                    f"terminationGracePeriodSeconds: {grace_s + 30:.0f}",
                )  # fmt: skip
