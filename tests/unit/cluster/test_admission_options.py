from __future__ import annotations

from cluster.cli.admission_options import PolicyName
from cluster.config import POLICY_NAMES, RouterConfig
from cluster.router.policies import POLICIES


def test_the_command_line_the_config_and_the_router_know_the_same_policies() -> None:
    assert [one.value for one in PolicyName] == list(POLICY_NAMES) == list(POLICIES)
    for name in POLICY_NAMES:
        assert RouterConfig(policy=name).policy == name
