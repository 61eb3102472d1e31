"""What Ray's own validators say about a file. Needs Ray; nothing is contacted."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Iterator
from typing import Any

from cluster.doctor.deploy.document import Document, Path
from cluster.doctor.finding import Finding

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RAY_FIELDS = "see Ray's reference of this file for its fields"


def cluster_schema_findings(document: Document) -> Iterator[Finding]:
    """Unknown fields, wrong types and wrong node types of a cluster file."""
    from jsonschema import ValidationError  # type: ignore[import-untyped]
    from ray.autoscaler._private.util import prepare_config, validate_config

    said = io.StringIO()
    logging.getLogger("ray.autoscaler").setLevel(logging.ERROR)
    try:
        # Ray prints warnings, and what is wrong with some files, itself.
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            validate_config(prepare_config(copy.deepcopy(document.values)))
    except ValidationError as error:
        path = tuple(error.absolute_path)
        unknown = re.search(r"\('(.+?)' was unexpected\)", error.message)
        yield document.find(
            "fail", (*path, unknown[1]) if unknown else path, f"Ray refuses the file: {error.message:.200}", _RAY_FIELDS
        )
    except Exception as error:  # noqa: BLE001 - Ray raises whatever comes of a value it did not expect
        lines = [line.strip() for line in _COLOURS.sub("", f"{said.getvalue()}\n{error}").splitlines() if line.strip()]
        yield document.find("fail", (), f"Ray refuses the file: {' '.join(lines[-2:])[:300]}", _RAY_FIELDS)


def serve_schema_findings(document: Document) -> Iterator[Finding]:
    """Wrong values of a Serve config, and unknown fields, which Ray would pass over in silence."""
    from pydantic import ValidationError
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(copy.deepcopy(document.values))
    except ValidationError as error:
        for problem in error.errors():
            yield document.find("fail", tuple(problem["loc"]), f"Ray Serve refuses it: {problem['msg']}", _RAY_FIELDS)
    yield from _unknown(document, (), ServeDeploySchema)
    for index, application in enumerate(document.items("applications")):
        yield from _unknown(document, ("applications", index), ServeApplicationSchema)
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for number in range(len(deployments or ())):
            yield from _unknown(document, ("applications", index, "deployments", number), DeploymentSchema)


def _unknown(document: Document, path: Path, schema: Any) -> Iterator[Finding]:
    known = sorted(schema.model_fields)
    for name in document.mapping(*path):
        if name not in known:
            yield document.find(
                "fail",
                (*path, name),
                f"Ray Serve knows no {name!r} here, and would pass over it in silence",
                f"one of {', '.join(known)}",
            )
