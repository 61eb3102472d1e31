from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.pool_soak import Broken, PoolSoak, alone, canaries, crowded_engine, soak
from tests.fakes.tiny_model import tiny_model


def after(num_steps: int) -> Callable[[], bool]:
    """Steps, not seconds: the same happens on a machine with something else to do."""
    left = iter(range(num_steps))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("graphs", [False, True])
def test_a_full_pool_brings_no_foreign_token_loses_no_block_and_never_stands_still(graphs: bool) -> None:
    tally, engine = soak(after(1200), device="cpu", graphs=graphs, num_canaries=16, seed=int(graphs))
    load = engine.load()
    assert tally.finished > 10
    assert tally.cancelled > 0
    assert engine.scheduler.num_preemptions > 5
    assert tally.occupancy > 0.7
    assert load.prefix_cache_hits > load.prefix_cache_queries // 10
    assert (load.eager_steps == 0) == graphs


def test_a_foreign_token_is_noticed() -> None:
    model = tiny_model()
    requests = canaries(4, seed=3)
    expected = [alone(model, request) for request in requests]
    engine = crowded_engine(model, graphs=False)
    find = engine.scheduler.pool.find

    def wrong_block(identity: bytes) -> int | None:
        """A cache that mixes two prompts up."""
        found = find(identity)
        known = sorted(engine.scheduler.pool._identities)
        return found if found is None or len(known) < 2 else next(block for block in known if block != found)

    engine.scheduler.pool.find = wrong_block  # type: ignore[method-assign]
    with pytest.raises(Broken, match="is foreign"):
        PoolSoak(engine, requests, expected, seed=0).run(after(3000))


def test_a_lost_block_is_noticed() -> None:
    model = tiny_model()
    requests = canaries(2, seed=4)
    engine = crowded_engine(model, graphs=False)
    engine.scheduler.pool.allocate(1)
    with pytest.raises(Broken, match="1 blocks are lost"):
        PoolSoak(engine, requests, [alone(model, request) for request in requests], seed=0).run(after(50))
