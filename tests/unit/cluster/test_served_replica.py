"""Where a replica that Serve has placed finds things."""

from __future__ import annotations

import pytest

from cluster.config import ReplicaConfig
from cluster.serve_app import router_address, with_router_addresses
from cluster.served_replica import place_name


@pytest.mark.parametrize(
    ("router", "found"),
    [
        ("head-address:50050", "10.0.0.10:50050"),
        ("10.0.0.7:50051", "10.0.0.7:50051"),
        ("router.internal:50050", "router.internal:50050"),
        ("my-head-address:50050", "my-head-address:50050"),
    ],
)
def test_a_router_on_the_head_needs_no_address_in_the_config(router: str, found: str) -> None:
    assert router_address(router, "10.0.0.10:6379") == found


def test_an_ipv6_head_keeps_its_brackets() -> None:
    assert router_address("head-address:50050", "[fd00::10]:6379") == "[fd00::10]:50050"


def test_without_the_heads_name_no_ray_is_asked() -> None:
    replica = ReplicaConfig(routers=("10.0.0.7:50051",))
    assert with_router_addresses(replica) is replica


def test_replicas_of_two_applications_do_not_take_each_others_names() -> None:
    assert place_name("graphpool", 0) == "replica-0"
    assert place_name("llama", 0) == "llama-0"
