"""S3 and S20: every method asks who calls, and nothing but the contract is there to be called."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.client import AsyncGraphpoolClient, GraphpoolClient, PermissionDenied, Unauthenticated
from cluster.config import ClientConfig
from cluster.security.access import LOOK, STEER, roles_for
from cluster.security.config import ClientSecurity
from cluster.security.tenants import add_token, read_tenants, revoke_token
from cluster.security.tokens import token_id
from tests.fakes.script_engine import script
from tests.fakes.script_pool import ScriptPool, script_pool
from tests.fakes.secured import Secured, secured, secured_pool

PROMPT = (10, 20, 30)
ROUTER_SERVICES = {
    "graphpool.v1.GenerationService",
    "graphpool.v1.ControlService",
    "graphpool.v1.MembershipService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}
REPLICA_SERVICES = ROUTER_SERVICES - {"graphpool.v1.MembershipService"} | {"graphpool.v1.ReplicaService"}


@pytest.fixture
def keys(tmp_path: Path) -> Secured:
    return secured(tmp_path, acme={}, globex={})


@pytest.fixture
async def pool(keys: Secured) -> AsyncIterator[ScriptPool]:
    async with secured_pool(keys, metrics=True) as made:
        yield made


def addresses(pool: ScriptPool) -> list[str]:
    return [pool.router.address, pool.replicas[0].server.address]


class WithToken:
    """A channel for libraries that take no metadata."""

    def __init__(self, address: str, token: str) -> None:
        self.channel = grpc.intercept_channel(grpc.insecure_channel(address), _Bearer(token))


class _Bearer(grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: str) -> None:
        self.token = token

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=(("authorization", f"Bearer {self.token}"),)), requests)


def all_methods(address: str, token: str) -> dict[str, tuple[bool, bool]]:
    """Every method the server tells of, by path: does the client stream, does the server."""
    database = ProtoReflectionDescriptorDatabase(WithToken(address, token).channel)
    schema = DescriptorPool(database)
    found: dict[str, tuple[bool, bool]] = {}
    for name in database.get_services():
        for method in schema.FindServiceByName(name).methods:
            found[f"/{name}/{method.name}"] = (method.client_streaming, method.server_streaming)
    return found


async def call(address: str, path: str, metadata: Any = None, raw: bytes = b"") -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(address) as channel:
        # On the wire a stream of one request is the same as one request, and this sends it in one piece.
        call: Any = channel.unary_stream(path)(raw, metadata=metadata, timeout=10)  # type: ignore[call-arg]
        return await call.code(), await call.details()


async def test_s3_every_method_of_every_service_refuses_a_call_without_a_token(pool: ScriptPool, keys: Secured) -> None:
    for address, services in zip(addresses(pool), (ROUTER_SERVICES, REPLICA_SERVICES), strict=True):
        methods = await asyncio.to_thread(all_methods, address, keys.tokens["monitor"])
        assert {path.split("/")[1] for path in methods} == services
        assert len(methods) >= 17
        for path in (*methods, "/graphpool.v1.GenerationService/NoSuchMethod", "/no.such.Service/Method"):
            for metadata in (
                None,
                (("authorization", keys.tokens["acme"]),),
                (("authorization", "Basic YWNtZTpwYXNz"),),
                (("authorization", "Bearer "),),
                (("authorization", "Bearer gp_00000000_" + "x" * 43),),
                (("authorization", f"Bearer {keys.tokens['acme'][:-1]}"),),
                (("authorization", f"Bearer {keys.tokens['acme']}x"),),
                (("authorization", "Bearer " + "a" * 4000),),
            ):
                code, details = await call(address, path, metadata)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (path, metadata, code, details)
                assert keys.tokens["acme"] not in details


async def test_s3_each_role_may_do_its_own_and_no_more(pool: ScriptPool, keys: Secured) -> None:
    for address in addresses(pool):
        methods = await asyncio.to_thread(all_methods, address, keys.tokens["acme"])
        for path in methods:
            allowed = {role.value for role in roles_for(path)}
            for tenant, role in (("acme", "user"), ("monitor", "monitor")):
                # Bytes that no message parses: whoever may call gets as far as the parser.
                code, _ = await call(address, path, keys.token(tenant), b"\xff")
                assert (code is grpc.StatusCode.PERMISSION_DENIED) == (role not in allowed), (path, role, code)
    assert roles_for("/graphpool.v1.ControlService/Drain") == STEER
    assert roles_for("/graphpool.v1.FaultService/Inject") == STEER
    assert set(roles_for("/grpc.health.v1.Health/Check")) == set(LOOK)


async def test_s3_a_tenant_generates_and_an_operator_steers(pool: ScriptPool, keys: Secured) -> None:
    answer = await pool.client.generate(PROMPT, max_tokens=4, temperature=0)
    assert answer.choices[0].token_ids == script(PROMPT, 0, 0, 4)
    assert await pool.client.tokenize("ab")
    replica = pool.replicas[0].server.name
    with pytest.raises(PermissionDenied):
        await pool.client.drain(replica, grace_s=0)
    async with client(pool, keys, "operator") as operator:
        await operator.drain(replica, grace_s=0)


async def test_s3_a_tenant_ends_its_own_requests_alone(pool: ScriptPool, keys: Secured) -> None:
    pool.replicas[0].engine.knobs.step_s = 0.02
    stream = pool.client.stream(PROMPT, request_id="acme-1", max_tokens=500, temperature=0, ignore_eos=True)
    await stream.__anext__()
    async with client(pool, keys, "globex") as other, client(pool, keys, "operator") as operator:
        assert not await other.abort("acme-1")
        assert not await other.abort("no-such-request")
        await stream.__anext__()
        assert await pool.client.abort("acme-1")
        second = pool.client.stream(PROMPT, request_id="acme-2", max_tokens=500, temperature=0, ignore_eos=True)
        await second.__anext__()
        assert await operator.abort("acme-2")


async def test_s3_a_new_token_works_and_a_revoked_one_does_not_within_two_seconds(
    pool: ScriptPool, keys: Secured
) -> None:
    token = add_token(keys.tenants, "newcomer")
    security = ClientSecurity(token=token)
    async with AsyncGraphpoolClient(pool.router.address, ClientConfig(max_attempts=1, security=security)) as newcomer:

        async def code() -> str:
            try:
                await newcomer.server_info(timeout_s=5)
            except Unauthenticated:
                return "refused"
            return "known"

        await until_async(code, "known")
        revoke_token(keys.tenants, token_id(token) or "")
        await until_async(code, "refused")
    answer = await pool.client.generate(PROMPT, max_tokens=2, temperature=0)
    assert answer.choices[0].token_ids


async def until_async(probe: Any, wanted: str) -> None:
    for _ in range(40):
        if await probe() == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still not {wanted} after two seconds")


async def test_s3_a_file_that_cannot_be_read_leaves_the_known_tenants(
    pool: ScriptPool, keys: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    keys.tenants.write_text("tenants: {acme: {tokens: [{id: broken")
    await asyncio.sleep(1.1)
    assert await pool.client.generate(PROMPT, max_tokens=2, temperature=0)
    assert "cannot be used, what was read before stays" in caplog.text


async def test_s3_the_metrics_ask_who_calls(pool: ScriptPool, keys: Secured) -> None:
    for address in (pool.router.metrics_address, pool.replicas[0].server.metrics_address):
        for path, there in (("metrics", 200), ("anything", 404)):
            assert await asyncio.to_thread(http_status, address, path, "") == 401
            assert await asyncio.to_thread(http_status, address, path, "Bearer x") == 401
            assert await asyncio.to_thread(http_status, address, path, f"Bearer {keys.tokens['acme']}") == 403
            assert await asyncio.to_thread(http_status, address, path, f"Bearer {keys.tokens['monitor']}") == there


async def test_s3_refusals_are_logged_once_a_second_without_the_token(
    pool: ScriptPool, keys: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = keys.tokens["acme"][:-1] + "!"
    for _ in range(50):
        await call(pool.router.address, "/graphpool.v1.ControlService/Drain", (("authorization", f"Bearer {wrong}"),))
    lines = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert 1 <= len(lines) <= 5
    assert "'/graphpool.v1.ControlService/Drain' of ipv4:127.0.0.1" in lines[0]
    assert wrong not in caplog.text


async def test_s3_tokens_lie_hashed_in_a_file_of_their_owner(keys: Secured) -> None:
    content = keys.tenants.read_text()
    assert not any(token in content or token.split("_")[2] in content for token in keys.tokens.values())
    assert keys.tenants.stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in keys.folder.glob("*.pem"))
    assert not any(token in repr(read_tenants(str(keys.tenants)).by_name) for token in keys.tokens.values())


async def test_s3_a_client_finds_its_token_in_the_environment(
    pool: ScriptPool, keys: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHPOOL_TOKEN", keys.tokens["acme"] + "\n")
    async with AsyncGraphpoolClient(pool.router.address) as asking:
        assert await asking.server_info()

    def block() -> str:
        with GraphpoolClient(pool.router.address) as client:
            return client.server_info().role

    assert await asyncio.to_thread(block) == "router"


def test_s3_a_token_does_not_travel_in_the_clear_to_another_machine() -> None:
    for target in ("10.0.0.5:50050", "dns:///router.example:50050"):
        with pytest.raises(ValueError, match="in the clear"):
            GraphpoolClient(target, token="gp_00000000_secret")
    GraphpoolClient("10.0.0.5:50050", ClientConfig(security=ClientSecurity(insecure=True)), token="x").close()
    GraphpoolClient("unix:/tmp/x", token="x").close()


async def test_s20_a_default_server_offers_the_contract_and_nothing_else() -> None:
    async with script_pool() as pool:
        for address, services in zip(addresses(pool), (ROUTER_SERVICES, REPLICA_SERVICES), strict=True):
            methods = await asyncio.to_thread(all_methods, address, "")
            assert {path.split("/")[1] for path in methods} == services
            for path in (
                "/graphpool.v1.FaultService/Inject",
                "/graphpool.v1.FaultService/Clear",
                "/graphpool.v1.ProfilerService/Start",
                "/grpc.channelz.v1.Channelz/GetServers",
                "/grpc.admin.v1.Admin/Get",
            ):
                assert (await call(address, path))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_s20_reflection_is_not_there_when_it_is_switched_off(keys: Secured) -> None:
    from dataclasses import replace

    from tests.fakes.script_pool import FAST

    async with (
        script_pool(router=replace(FAST, reflection=False)) as pool,
        grpc.aio.insecure_channel(pool.router.address) as channel,
    ):
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


def client(pool: ScriptPool, keys: Secured, tenant: str) -> AsyncGraphpoolClient:
    config = ClientConfig(max_attempts=1, security=ClientSecurity(token=keys.tokens[tenant]))
    return AsyncGraphpoolClient(pool.router.address, config)


def http_status(address: str, path: str, authorization: str) -> int:
    request = urllib.request.Request(f"http://{address}/{path}")
    if authorization:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
