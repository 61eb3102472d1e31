from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.replica.gpu import gpu_of


def test_a_gpu_is_known_by_its_uuid_and_what_is_none_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def properties(device: str) -> Any:
        asked.append(device)
        return SimpleNamespace(uuid="11111111-2222")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert gpu_of("cuda:1") == "GPU-11111111-2222"
    assert gpu_of("cpu") == ""
    assert asked == ["cuda:1"]


def test_a_gpu_that_does_not_say_which_it_is_keeps_no_replica_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(_: str) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert gpu_of("cuda") == ""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="old"))
    assert gpu_of("cuda") == ""
