"""The option that makes a worker deterministic."""

from __future__ import annotations

import pytest

from cluster.answers import model_to_proto
from tests.fakes.command_line import graphpool
from tests.fakes.tiny_model import tiny_engine, tiny_model


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_a_combination_that_cannot_be_deterministic_is_wrong_usage(command: str) -> None:
    ended = graphpool(command, "--deterministic", "--set", "model_impl=transformers", timeout_s=120)
    assert ended.returncode == 2
    assert "native decoder can be" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("deterministic", [False, True])
def test_clients_are_told(deterministic: bool) -> None:
    info = tiny_engine(tiny_model(), deterministic=deterministic).info
    assert model_to_proto(info).is_deterministic is deterministic
