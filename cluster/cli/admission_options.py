"""Options of how a router places requests and what it refuses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cluster.cli.options import NETWORK

ROUTING = "Routing"


class PolicyName(StrEnum):
    """How a replica is chosen."""

    LEAST_TOKENS = "least-tokens"
    PREFIX = "prefix"
    TIER_FIT = "tier-fit"


class CriticalityName(StrEnum):
    """What is given up first when there is too much work."""

    SHEDDABLE = "sheddable"
    SHEDDABLE_PLUS = "sheddable-plus"
    CRITICAL = "critical"
    CRITICAL_PLUS = "critical-plus"


Criticality = Annotated[
    CriticalityName,
    typer.Option(
        help="What is given up first when there is too much work: the first of these.", rich_help_panel=NETWORK
    ),
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="least-tokens: where there is least to do. prefix: prompts that begin alike go together, within a bound. "
        "tier-fit: where a slot of the request's length is free.",
        rich_help_panel=ROUTING,
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        min=1, help="Sequences that may queue in one replica; with all full, more are refused.", rich_help_panel=ROUTING
    ),
]
MaxWaitS = Annotated[
    float,
    typer.Option(
        min=0.001, help="A request that would wait longer for its first token is refused.", rich_help_panel=ROUTING
    ),
]
