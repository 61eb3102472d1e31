"""S1 and S2: certificates between clients, routers and replicas, and what may be bound without them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, Unavailable
from cluster.config import ClientConfig, ReplicaConfig, RouterConfig
from cluster.router.server import RouterServer
from cluster.security.certs import CertificateFolder, CertRole
from cluster.security.config import REPLICA_NAME, SecurityConfig
from protos import replica_pb2, replica_pb2_grpc
from tests.fakes.command_line import read_until, running
from tests.fakes.script_engine import script
from tests.fakes.script_pool import FAST, ScriptPool, start_replica
from tests.fakes.secured import HOSTS, Secured, expired, secured, secured_pool
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)


@pytest.fixture
def keys(tmp_path: Path) -> Secured:
    return secured(tmp_path, acme={})


@pytest.fixture
async def pool(keys: Secured) -> AsyncIterator[ScriptPool]:
    async with secured_pool(keys, tls=True) as made:
        yield made


async def answer_of(client: AsyncGraphpoolClient) -> tuple[int, ...]:
    answer = await client.generate(PROMPT, max_tokens=4, temperature=0, seed=0, timeout_s=10)
    return tuple(answer.choices[0].token_ids)


async def test_s1_a_pool_generates_over_mutual_tls_from_end_to_end(pool: ScriptPool) -> None:
    assert await answer_of(pool.client) == script(PROMPT, 0, 0, 4)


@pytest.mark.parametrize("case", ["no certificate", "expired", "of another CA", "no TLS"])
async def test_s1_a_client_without_a_good_certificate_is_refused(
    pool: ScriptPool, keys: Secured, tmp_path: Path, case: str
) -> None:
    security = keys.client("acme")
    if case == "no certificate":
        security = keys.client("acme", cert="")
    elif case == "expired":
        expired(keys.folder, "late", CertRole.CLIENT)
        with pytest.raises(ValueError, match=r"late\.pem has expired"):
            AsyncGraphpoolClient(pool.router.address, ClientConfig(security=keys.client("acme", cert="late")))
        # What the client library sees for itself, a stranger's client would try.
        async with keys.channel(pool.router.address, cert="late") as channel:
            await refused(channel, keys)
        return
    elif case == "of another CA":
        other = secured(tmp_path / "other")
        security = replace(
            security, tls_cert=str(other.folder / "client.pem"), tls_key=str(other.folder / "client-key.pem")
        )
    else:
        security = replace(security, tls_ca="", tls_cert="", tls_key="")
    async with AsyncGraphpoolClient(pool.router.address, ClientConfig(max_attempts=1, security=security)) as client:
        with pytest.raises(Unavailable):
            await answer_of(client)


async def refused(channel: grpc.aio.Channel, keys: Secured) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replica_pb2_grpc.MembershipServiceStub(channel).Announce(
            replica_pb2.AnnounceRequest(), metadata=keys.token("operator"), timeout=5
        )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_s1_a_client_refuses_a_router_of_another_ca_or_name(
    pool: ScriptPool, keys: Secured, tmp_path: Path
) -> None:
    other = secured(tmp_path / "other")
    for security in (
        replace(keys.client("acme"), tls_ca=str(other.folder / "ca.pem")),
        replace(keys.client("acme"), tls_name="elsewhere.example"),
    ):
        async with AsyncGraphpoolClient(pool.router.address, ClientConfig(max_attempts=1, security=security)) as client:
            with pytest.raises(Unavailable):
                await answer_of(client)


async def test_s1_a_router_refuses_a_replica_with_the_wrong_name_and_says_so(
    keys: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys.certificates.issue("replica", [CertRole.CLIENT], HOSTS)  # of our CA, but no replica's
    impostor = await start_replica(ReplicaConfig(security=keys.server("replica")))
    router = RouterServer(replace(FAST, replicas=(impostor.server.address,), security=keys.server("router")))
    await router.start()
    try:
        await until(lambda: "Hostname Verification Check failed" in caplog.text, 10)
        assert not router.pool.has_ready
    finally:
        await router.stop()
        await impostor.stop()


async def test_s1_a_replica_with_an_expired_certificate_does_not_start(keys: Secured) -> None:
    expired(keys.folder, "replica", CertRole.REPLICA)
    with pytest.raises(ValueError, match=r"replica\.pem has expired, at 20"):
        await start_replica(ReplicaConfig(security=keys.server("replica")))


@pytest.mark.parametrize("cert", ["client", "replica"])
async def test_s1_only_a_router_may_attach(pool: ScriptPool, keys: Secured, cert: str) -> None:
    address = pool.replicas[0].server.address
    async with keys.channel(address, cert=cert, name=REPLICA_NAME) as channel:
        call = replica_pb2_grpc.ReplicaServiceStub(channel).Attach()  # type: ignore[call-arg]
        code = await call.code()
    assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@pytest.mark.parametrize("cert", ["client", "router"])
async def test_s1_only_a_replica_may_announce(pool: ScriptPool, keys: Secured, cert: str) -> None:
    async with keys.channel(pool.router.address, cert=cert) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replica_pb2_grpc.MembershipServiceStub(channel).Announce(replica_pb2.AnnounceRequest(), timeout=5)
    assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def test_s1_renewed_certificates_are_taken_without_dropping_a_stream(pool: ScriptPool, keys: Secured) -> None:
    pool.replicas[0].engine.knobs.step_s = 0.02
    streams = [pool.client.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True) for _ in range(8)]
    tasks = [asyncio.create_task(tokens_of(stream)) for stream in streams]
    await asyncio.sleep(0.5)
    old = served_certificate(keys, pool.router.address)
    keys.certificates.renew()
    await asyncio.sleep(1.1)  # files are looked at once a second
    assert served_certificate(keys, pool.router.address) != old
    assert served_certificate(keys, pool.replicas[0].server.address) != old
    assert not any(task.done() for task in tasks)
    async with AsyncGraphpoolClient(
        pool.router.address, ClientConfig(max_attempts=1, security=keys.client("acme"))
    ) as fresh:
        assert await answer_of(fresh) == script(PROMPT, 0, 0, 4)
    assert [len(tokens) for tokens in await asyncio.gather(*tasks)] == [200] * 8


async def test_s1_a_new_ca_takes_over_with_overlap(pool: ScriptPool, keys: Secured) -> None:
    old = CertificateFolder(keys.folder).issue("old", [CertRole.CLIENT])
    folder = keys.certificates
    folder.add_ca()
    await asyncio.sleep(1.1)
    assert await fresh_answer(pool, keys, "client")  # an old certificate, and a new list of CAs
    names = [name for name in folder.names if name != "old"]
    for name in names:
        folder.issue(name, [CertRole(name)], HOSTS)
    await asyncio.sleep(1.1)
    assert await fresh_answer(pool, keys, "client")
    assert await fresh_answer(pool, keys, "old")
    with pytest.raises(ValueError, match=r"old\.pem is signed by an old CA"):
        folder.retire_old_cas()
    kept = old.read_bytes(), old.with_name("old-key.pem").read_bytes()
    folder.issue("old", [CertRole.CLIENT])
    assert folder.retire_old_cas() == 1
    await asyncio.sleep(1.1)
    assert await fresh_answer(pool, keys, "client")
    for path, content in zip((old, old.with_name("old-key.pem")), kept, strict=True):
        path.write_bytes(content)
    with pytest.raises(Unavailable):
        await fresh_answer(pool, keys, "old")


async def test_s1_a_pair_that_does_not_fit_leaves_the_old_one_in_use(
    pool: ScriptPool, keys: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    (keys.folder / "router.pem").write_bytes((keys.folder / "replica.pem").read_bytes())
    await asyncio.sleep(1.1)
    assert await fresh_answer(pool, keys, "client")
    assert "router-key.pem is not the key of" in caplog.text


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_s1_tls_before_1_2_is_refused(tmp_path: Path) -> None:
    keys = secured(tmp_path)
    with router_process(keys) as (address, _):
        host, port = address.split(":")
        outcomes = {}
        for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=str(keys.folder / "ca.pem"))
            context.load_cert_chain(keys.folder / "client.pem", keys.folder / "client-key.pem")
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2"])
            context.minimum_version = context.maximum_version = version
            try:
                with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw, server_hostname=host):
                    outcomes[version.name] = True
            except ssl.SSLError:
                outcomes[version.name] = False
    assert outcomes == {"TLSv1_1": False, "TLSv1_2": True, "TLSv1_3": True}


def test_s2_a_port_for_others_needs_tls_and_tokens_or_insecure_said_out_loud(tmp_path: Path) -> None:
    keys = secured(tmp_path)
    everywhere = {"listen": "0.0.0.0:0", "metrics_listen": "0.0.0.0:0"}
    for security in (SecurityConfig(), keys.plain(), keys.server("router", tls_ca="", tokens="")):
        with pytest.raises(ValueError, match="can be reached by others"):
            RouterConfig(**everywhere, security=security)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="can be reached by others"):
            ReplicaConfig(**everywhere, advertise="h", security=security)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="metrics_listen"):
            RouterConfig(metrics_listen="0.0.0.0:0", security=security)
        RouterConfig(**everywhere, security=security, insecure=True)  # type: ignore[arg-type]
    RouterConfig(**everywhere, security=keys.server("router"))  # type: ignore[arg-type]
    ReplicaConfig(**everywhere, advertise="h", security=keys.server("replica", tokens=""))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["router", "worker", "serve"])
def test_s2_a_command_that_would_be_open_to_others_ends_at_once(command: str) -> None:
    with running(command, "--host", "0.0.0.0", "--port", "0", stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert "--insecure" in process.stderr.read()


def test_s1_a_refused_handshake_leaves_a_clear_line_where_it_is_asked_for(tmp_path: Path) -> None:
    keys = secured(tmp_path)
    expired(keys.folder, "late", CertRole.CLIENT)
    with router_process(keys, GRPC_VERBOSITY="INFO") as (address, process):
        host, port = address.split(":")
        for name in ("late", ""):
            context = ssl.create_default_context(cafile=str(keys.folder / "ca.pem"))
            if name:
                context.load_cert_chain(keys.folder / "late.pem", keys.folder / "late-key.pem")
            context.set_alpn_protocols(["h2"])
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 5) as raw,
                context.wrap_socket(raw, server_hostname=host) as secure,
            ):
                secure.recv(100)
        read_until(process, "certificate has expired")
        read_until(process, "PEER_DID_NOT_RETURN_A_CERTIFICATE")


@contextlib.contextmanager
def router_process(keys: Secured, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`graphpool router` with TLS; its address and itself."""
    config = keys.server("router")
    options = (
        *("--tls-cert", config.tls_cert, "--tls-key", config.tls_key, "--tls-ca", config.tls_ca),
        *("--tokens", config.tokens, "--host", "127.0.0.1", "--port", "0"),
    )
    streams: dict[str, object] = {"stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    with running("router", *options, **streams) as process:  # type: ignore[arg-type]
        yield read_until(process, r"router at (127\.0\.0\.1:\d+)")[1], process


async def tokens_of(stream: object) -> list[int]:
    return [token async for piece in stream for choice in piece.choices for token in choice.token_ids]  # type: ignore[attr-defined]


async def fresh_answer(pool: ScriptPool, keys: Secured, cert: str) -> tuple[int, ...]:
    config = ClientConfig(max_attempts=1, security=keys.client("acme", cert=cert))
    async with AsyncGraphpoolClient(pool.router.address, config) as client:
        return await answer_of(client)


def served_certificate(keys: Secured, address: str) -> str:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=str(keys.folder / "ca.pem"))
    context.load_cert_chain(keys.folder / "client.pem", keys.folder / "client-key.pem")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw, server_hostname=host) as secure:
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
