"""Whatever stands in a field of a file, `graphpool doctor deploy` answers with findings or one sentence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.doctor.deploy.check import check_deployment
from tests.fakes.command_line import ROOT

FILES = sorted(file for name in ("ray-up", "serve", "kubernetes") for file in (ROOT / "deploy" / name).glob("*.yaml"))
NONSENSE = st.sampled_from([None, 3, -1.5, "x", "", [], {}, ["x"], {"x": [1]}, True])

Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Of everything in it, containers included."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(value: Any, path: Place, new: Any) -> Any:
    changed = copy.deepcopy(value)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = new
    return changed


def answers(file: Path) -> None:
    with contextlib.suppress(ValueError):
        assert all(finding.detail and finding.check for finding in check_deployment([file]))


@pytest.mark.parametrize("source", FILES, ids=lambda file: file.name)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_a_file_with_nonsense_in_a_field_gets_an_answer(tmp_path: Path, source: Path, choice: st.DataObject) -> None:
    documents = list(yaml.safe_load_all(source.read_text()))
    path = choice.draw(st.sampled_from(list(places(documents))))
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump_all(replaced(documents, path, choice.draw(NONSENSE))))
    answers(file)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_nonsense_in_the_serve_config_of_a_manifest_gets_an_answer(tmp_path: Path, choice: st.DataObject) -> None:
    manifest = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text())
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    path = choice.draw(st.sampled_from(list(places(serve))))
    manifest["spec"]["serveConfigV2"] = yaml.safe_dump(replaced(serve, path, choice.draw(NONSENSE)))
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(manifest))
    answers(tmp_path / "file.yaml")
