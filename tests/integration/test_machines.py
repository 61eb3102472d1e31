"""Machines of namespaces hide /tmp and /home of the real one, but nothing that tests need there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.machines import machines, missing

PROBLEM = missing()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=f"no second machine: {PROBLEM}")


def test_models_in_a_folder_that_a_machine_hides_are_found_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with machines(tmp_path / "made", "one") as (machine,):
        model = tmp_path / "cache" / "graphpool" / "model"
        model.write_text("is here")
        (tmp_path / "other").write_text("is not")
        assert machine.shell(f"cat {model}") == "is here"
        assert machine.run("cat", str(tmp_path / "other")).returncode != 0
