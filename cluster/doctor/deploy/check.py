"""What is wrong with the files that bring a cluster up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from cluster.doctor.deploy.cluster_file import cluster_findings, gpu_nodes
from cluster.doctor.deploy.document import Document, read_documents
from cluster.doctor.deploy.ray_service import is_ray, manifest_findings, ray_service_findings
from cluster.doctor.deploy.secrets import placeholder_findings, secret_findings
from cluster.doctor.deploy.serve_config import placement_findings, serve_findings
from cluster.doctor.finding import Finding

Kind = Literal["cluster", "serve", "ray", "other"]


def check_deployment(files: Sequence[Path], *, step_ms: float | None = None) -> list[Finding]:
    """Findings of all files, each by itself and then against each other.

    Raises OSError for a file that cannot be read, ValueError for one that is no YAML or of no known kind.
    """
    read = {file: _read(file, file.name if len(files) > 1 else "") for file in files}
    findings: list[Finding] = []
    for file, documents in read.items():
        found = list(_of_file(file, documents, step_ms))
        findings += found or [
            Finding(file.name, "ok", f"a {_named(documents)}; nothing is wrong with it that can be seen")
        ]
    everything = [document for documents in read.values() for document in documents]
    return [*findings, *manifest_findings(everything), *_across(everything)]


def kind_of(document: Document) -> Kind:
    """What it is for."""
    if "provider" in document.mapping() and "cluster_name" in document.mapping():
        return "cluster"
    if "applications" in document.mapping():
        return "serve"
    if is_ray(document):
        return "ray"
    return "other"


def _read(file: Path, name: str) -> list[Document]:
    try:
        text = file.read_text(encoding="utf-8")
        documents = [document for document in read_documents(text, name) if document.values is not None]
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    kinds = {kind_of(document) for document in documents}
    if kinds <= {"other"} and not any("apiVersion" in document.mapping() for document in documents):
        raise ValueError(f"{file} is neither a cluster file of `ray up`, nor a Serve config, nor a Kubernetes manifest")
    return documents


def _of_file(file: Path, documents: Sequence[Document], step_ms: float | None) -> Iterator[Finding]:
    for document in documents:
        kind = kind_of(document)
        if kind == "cluster":
            yield from cluster_findings(document, _root(file))
        elif kind == "serve":
            yield from serve_findings(document, step_ms)
        elif kind == "ray":
            yield from ray_service_findings(document, step_ms)
        yield from secret_findings(document)
        yield from placeholder_findings(document)


def _across(documents: Sequence[Document]) -> Iterator[Finding]:
    """Replicas of Serve configs on the nodes of cluster files."""
    clusters = [
        document
        for document in documents
        if kind_of(document) == "cluster" and document.mapping("available_node_types")
    ]
    nodes = [(gpus, count) for document in clusters for gpus, count in gpu_nodes(document) if gpus is not None]
    if not clusters or len(nodes) < sum(len(gpu_nodes(document)) for document in clusters):
        return
    for document in documents:
        if kind_of(document) == "serve":
            yield from placement_findings(document, nodes)


def _root(file: Path) -> Path:
    """What the file's local paths are relative to: the nearest folder above it that has a `deploy`, else where we are."""
    folders = [folder for folder in file.resolve().parents if (folder / "deploy").is_dir()]
    return folders[0] if folders else Path.cwd()


def _named(documents: Sequence[Document]) -> str:
    kinds = {kind_of(document) for document in documents}
    return "cluster file" if "cluster" in kinds else "Serve config" if "serve" in kinds else "Kubernetes manifest"
