"""Several routers of one pool that asks who calls: one quota, and verdicts that only routers bring."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, InternalError, ResourceExhausted
from cluster.config import ClientConfig
from cluster.router.quarantine import fingerprint
from cluster.router.server import RouterServer
from cluster.security.config import REPLICA_NAME, ClientSecurity
from cluster.security.secret_file import read_secret
from protos import generation_pb2, replica_pb2, replica_pb2_grpc
from tests.fakes.script_pool import FAST, ScriptPool
from tests.fakes.secured import Secured, secured, secured_pool
from tests.fakes.waiting import until

RATE, BURST, COST = 400, 80, 40
GUILTY = generation_pb2.GenerateRequest(
    token_ids=generation_pb2.TokenIds(ids=[66, 6]), sampling=generation_pb2.SamplingParams(max_tokens=4)
)


@contextlib.asynccontextmanager
async def second_router(pool: ScriptPool, keys: Secured, **changes: Any) -> AsyncIterator[RouterServer]:
    """Over the same replicas."""
    router = RouterServer(replace(FAST, security=keys.plain(), **changes))
    await router.start()
    try:
        for one in pool.replicas:
            one.server.announce_to((pool.router.address, router.address))
        await router.wait_ready(len(pool.replicas), timeout_s=10)
        yield router
    finally:
        await router.stop()


def client_of(router: RouterServer, keys: Secured) -> AsyncGraphpoolClient:
    return AsyncGraphpoolClient(
        router.address, ClientConfig(max_attempts=1, security=ClientSecurity(token=keys.tokens["acme"]))
    )


async def spent(asking: AsyncGraphpoolClient, until_s: float) -> int:
    """Tokens that were given out to somebody who asks for all there are."""
    num_tokens = 0
    while time.monotonic() < until_s:
        try:
            await asking.generate(range(20), max_tokens=20, temperature=0, ignore_eos=True)
            num_tokens += COST
        except ResourceExhausted:
            await asyncio.sleep(0.01)
    return num_tokens


async def test_s18_two_routers_give_out_one_quota_and_one_of_them_half_of_it(tmp_path: Path) -> None:
    keys = secured(tmp_path, acme={"tokens_per_s": RATE, "burst_tokens": BURST})
    async with secured_pool(keys) as pool, second_router(pool, keys) as second, client_of(second, keys) as other:
        await until(lambda: pool.router._num_sharing() == second._num_sharing() == 2, 5)
        began_s = time.monotonic()
        both = await asyncio.gather(*(spent(asking, began_s + 3) for asking in (pool.client, other)))
        entitled = BURST + RATE * (time.monotonic() - began_s)
        assert 0.75 * entitled < sum(both) <= entitled + 2 * COST
        assert max(both) <= 0.5 * entitled + 2 * COST
        began_s = time.monotonic()
        alone = await spent(other, began_s + 2)
        assert alone <= 0.5 * (BURST + RATE * (time.monotonic() - began_s)) + 2 * COST


async def attach(
    address: str, metadata: Any, verdict: replica_pb2.PoisonVerdict, channel: grpc.aio.Channel | None = None
) -> grpc.StatusCode:
    """Bring a verdict to a replica, and stay for a moment."""

    async def frames() -> AsyncIterator[replica_pb2.RouterFrame]:
        yield replica_pb2.RouterFrame(hello=replica_pb2.RouterHello(router="mallory"))
        yield replica_pb2.RouterFrame(poison=verdict)
        await asyncio.sleep(0.5)

    async with channel or grpc.aio.insecure_channel(address) as opened:
        while True:
            call: Any = replica_pb2_grpc.ReplicaServiceStub(opened).Attach(frames(), metadata=metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            # A refusal that comes while the client writes is hidden by the error of that.
            if await call.details() != "Internal error from Core":
                return grpc.StatusCode(await call.code())


async def test_s18_only_a_router_brings_a_verdict_and_it_is_keyed_with_the_pools_secret(tmp_path: Path) -> None:
    keys = secured(tmp_path, acme={})
    secret = read_secret(str(keys.folder / "pool-token"))
    async with secured_pool(keys) as pool:
        address, quarantine = pool.replicas[0].server.address, pool.router._quarantine
        keyed = replica_pb2.PoisonVerdict(fingerprint=fingerprint(GUILTY, secret), ttl_s=60)
        for tenant, code in (("acme", "PERMISSION_DENIED"), ("operator", "PERMISSION_DENIED"), ("", "UNAUTHENTICATED")):
            metadata = keys.token(tenant) if tenant else None
            assert (await attach(address, metadata, keyed)).name == code
        assert len(quarantine) == 0
        assert await pool.client.generate([66, 6], max_tokens=4)

        router = (("authorization", f"Bearer {secret}"),)
        unkeyed = replica_pb2.PoisonVerdict(fingerprint=fingerprint(GUILTY), ttl_s=60)
        await attach(address, router, unkeyed)
        assert len(quarantine) == 1
        assert await pool.client.generate([66, 6], max_tokens=4), "the hash of a prompt alone says nothing"

        await attach(address, router, keyed)
        with pytest.raises(InternalError) as caught:
            await pool.client.generate([66, 6], max_tokens=4)
        assert caught.value.is_poison


async def test_s18_without_a_secret_a_verdict_has_no_key_and_travels_by_certificates_alone(tmp_path: Path) -> None:
    keys = secured(tmp_path, acme={})
    async with secured_pool(keys, tls=True) as pool:
        address, quarantine = pool.replicas[0].server.address, pool.router._quarantine
        verdict = replica_pb2.PoisonVerdict(fingerprint=fingerprint(GUILTY), ttl_s=60)
        for cert, tenant, code in (("client", "acme", "PERMISSION_DENIED"), ("replica", "", "PERMISSION_DENIED")):
            channel = keys.channel(address, cert=cert, name=REPLICA_NAME)
            metadata = keys.token(tenant) if tenant else None
            assert (await attach(address, metadata, verdict, channel)).name == code
        assert len(quarantine) == 0
        await attach(address, None, verdict, keys.channel(address, cert="router", name=REPLICA_NAME))
        await until(lambda: len(quarantine) == 1, 5)
        with pytest.raises(InternalError) as caught:
            await pool.client.generate([66, 6], max_tokens=4)
        assert caught.value.is_poison
