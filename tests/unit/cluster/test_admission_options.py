from __future__ import annotations

import pytest

from cluster.cli.admission_options import CriticalityName, PolicyName
from cluster.config import CRITICALITIES, POLICY_NAMES, ClientConfig, RouterConfig
from cluster.criticality import NAMES
from cluster.router.policies import POLICIES


def test_the_command_line_the_config_and_the_router_know_the_same_policies() -> None:
    assert [one.value for one in PolicyName] == list(POLICY_NAMES) == list(POLICIES)
    for name in POLICY_NAMES:
        assert RouterConfig(policy=name).policy == name


def test_the_command_line_the_config_and_the_servers_know_the_same_classes() -> None:
    assert [one.value for one in CriticalityName] == list(CRITICALITIES) == list(NAMES)
    for name in CRITICALITIES:
        assert ClientConfig(criticality=name).criticality == name
    with pytest.raises(ValueError, match="criticality 'urgent' is not one of sheddable"):
        ClientConfig(criticality="urgent")
