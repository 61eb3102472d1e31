"""YAML documents that know their lines, and the command that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.doctor.deploy.check import check_deployment
from cluster.doctor.deploy.document import read_documents, shown
from tests.fakes.command_line import ROOT, graphpool


def test_every_value_knows_its_line() -> None:
    (document,) = read_documents("a:\n  - b: 1\n    c: 2\n# comment\nd: {e: 3}\n")
    assert document.line(("a", 0, "c")) == 3
    assert document.line(("d", "e")) == 5
    assert document.line(("d", "missing", "deeper")) == 5
    assert document.get("a", 0, "b") == 1
    assert document.get("a", 7, "b", default="none") == "none"
    assert dict(document.scalars()) == {("a", 0, "b"): 1, ("a", 0, "c"): 2, ("d", "e"): 3}


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="line 3: 'a' is there twice"):
        read_documents("a: 1\nb: 2\na: 3\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]\n", "line 1: values lie in each other more than 64 deep"),
        ("&a {x: *a}\n", "line 1: values lie in each other more than 64 deep"),
        ("[" * 5000, "values lie in each other too deep"),
        ("- " * 3000 + "x", "values lie in each other too deep"),
        ("a: 1\n? [1, 2]\n: x\n", "line 2: a key is a list or a mapping"),
        ("? {a: b}\n: x\n", "line 1: a key is a list or a mapping"),
    ],
)
def test_a_document_that_cannot_be_a_tree_of_names_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_documents(text)


@pytest.mark.timeout(20)
def test_aliases_that_write_out_to_billions_of_values_are_refused_at_once() -> None:
    levels = [f"{chr(98 + level)}: &{chr(98 + level)} [{','.join(['*' + chr(97 + level)] * 9)}]" for level in range(9)]
    with pytest.raises(ValueError, match="there are more than 100000 values"):
        read_documents("\n".join(["a: &a [x]", *levels]))


def test_a_merged_mapping_may_be_overridden() -> None:
    (document,) = read_documents("x: &x {a: 1, b: 2}\ny:\n  <<: *x\n  b: 3\n")
    assert document.get("y") == {"a": 1, "b": 3}


def test_no_object_is_made_of_a_tag() -> None:
    with pytest.raises(ValueError, match="no YAML"):
        read_documents("a: !!python/object/apply:os.system [true]\n")


@pytest.mark.parametrize(
    ("path", "text"),
    [(("a",), "a"), (("a", "b", "c"), "b.c"), (("a", "b", 0, "c"), "b[0].c"), (("a", 2), "a[2]"), ((), "")],
)
def test_a_place_is_shown_by_its_last_names(path: tuple[str | int, ...], text: str) -> None:
    assert shown(path) == text


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "no YAML"), ("a: 1\n", "neither a cluster file"), ("", "neither")]
)
def test_a_file_of_no_known_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        check_deployment([tmp_path / "x.yaml"])


def test_the_command_ends_with_1_for_a_mistake_and_says_where(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "serve" / "pool.yaml").read_text()
    file = tmp_path / "pool.yaml"
    file.write_text(text.replace("proxy_location: Disabled", "proxy_location: EveryNode"))
    done = graphpool("doctor", "deploy", str(file), "--json")
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["checks"]
    assert found["check"] == f"line {text.splitlines().index('proxy_location: Disabled') + 1}: proxy_location"


def test_the_command_ends_with_0_for_the_shipped_files() -> None:
    files = [file for name in ("ray-up", "serve", "kubernetes") for file in (ROOT / "deploy" / name).glob("*.yaml")]
    done = graphpool("doctor", "deploy", *map(str, files))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_file_is_one_sentence() -> None:
    done = graphpool("doctor", "deploy", "/nonexistent.yaml")
    assert (done.returncode, done.stderr.strip()) == (1, "No such file or directory: /nonexistent.yaml")
