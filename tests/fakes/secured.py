"""Certificates and tokens for tests, in one folder."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from cluster.client import AsyncGraphpoolClient
from cluster.config import ClientConfig, ReplicaConfig
from cluster.router.server import RouterServer
from cluster.security.caller import Role
from cluster.security.certs import CertificateFolder, CertRole
from cluster.security.config import ROUTER_NAME, ClientSecurity, SecurityConfig
from cluster.security.secret_file import write_secret
from cluster.security.tenants import add_token
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, ScriptPool, ScriptReplica, start_replica

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Secured:
    """A CA's folder and a file of tenants."""

    folder: Path
    tokens: Mapping[str, str]
    """By tenant."""

    @property
    def certificates(self) -> CertificateFolder:
        return CertificateFolder(self.folder)

    @property
    def tenants(self) -> Path:
        return self.folder / "tenants.yaml"

    def server(self, name: str, **changes: Any) -> SecurityConfig:
        """With everything on: TLS, client certificates and tokens; NAME is the certificate's."""
        config = SecurityConfig(
            tls_cert=str(self.folder / f"{name}.pem"),
            tls_key=str(self.folder / f"{name}-key.pem"),
            tls_ca=str(self.folder / "ca.pem"),
            tokens=str(self.tenants),
        )
        return replace(config, **changes)

    def plain(self) -> SecurityConfig:
        """Tokens without TLS, for loopback."""
        return SecurityConfig(tokens=str(self.tenants), pool_token=str(self.folder / "pool-token"))

    def client(self, tenant: str = "", *, cert: str = "client", **changes: Any) -> ClientSecurity:
        """A tenant's client with the certificate of that name; "" = without."""
        config = ClientSecurity(
            tls_ca=str(self.folder / "ca.pem"),
            tls_cert=str(self.folder / f"{cert}.pem") if cert else "",
            tls_key=str(self.folder / f"{cert}-key.pem") if cert else "",
            token=self.tokens.get(tenant, ""),
        )
        return replace(config, **changes)

    def token(self, tenant: str) -> tuple[tuple[str, str], ...]:
        """Metadata of a call."""
        return (("authorization", f"Bearer {self.tokens[tenant]}"),)

    def channel(self, address: str, *, cert: str = "client", name: str = ROUTER_NAME) -> grpc.aio.Channel:
        """With a certificate and without a token."""
        files = [(self.folder / file).read_bytes() for file in ("ca.pem", f"{cert}-key.pem", f"{cert}.pem")]
        options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


def secured(folder: Path, **tenants: Mapping[str, float]) -> Secured:
    """Certificates of every role, tokens of an operator, a monitor and these tenants with their limits."""
    made = CertificateFolder(folder / "certs")
    made.create()
    made.issue("router", [CertRole.ROUTER], HOSTS)
    made.issue("replica", [CertRole.REPLICA], HOSTS)
    made.issue("client", [CertRole.CLIENT])
    write_secret(made.folder / "pool-token")
    file = made.folder / "tenants.yaml"
    tokens = {name: add_token(file, name, limits=limits) for name, limits in tenants.items()}
    tokens["operator"] = add_token(file, "operator", roles=(Role.OPERATOR,))
    tokens["monitor"] = add_token(file, "monitor", roles=(Role.MONITOR,))
    return Secured(made.folder, tokens)


def expired(folder: Path, name: str, role: CertRole) -> None:
    """Replace a certificate by one that ended yesterday."""
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    CertificateFolder(folder, now=yesterday).issue(name, [role], HOSTS, days=1)


@contextlib.asynccontextmanager
async def secured_pool(
    keys: Secured,
    *,
    tls: bool = False,
    num_replicas: int = 1,
    knobs: ScriptKnobs | None = None,
    metrics: bool = False,
    tenant: str = "acme",
) -> AsyncIterator[ScriptPool]:
    """A pool that asks who calls; its client is `tenant`'s. Without TLS the replicas know the pool's secret."""
    listen = "127.0.0.1:0" if metrics else ""
    router = RouterServer(replace(FAST, security=keys.server("router") if tls else keys.plain(), metrics_listen=listen))
    await router.start()
    config = ReplicaConfig(
        routers=(router.address,),
        security=keys.server("replica") if tls else keys.plain(),
        metrics_listen=listen,
    )
    security = keys.client(tenant) if tls else ClientSecurity(token=keys.tokens[tenant])
    client = AsyncGraphpoolClient(router.address, ClientConfig(max_attempts=1, security=security))
    replicas: list[ScriptReplica] = []
    try:
        while len(replicas) < num_replicas:
            replicas.append(await start_replica(config, replace(knobs or ScriptKnobs())))
        await router.wait_ready(num_replicas, timeout_s=10)
        yield ScriptPool(router, replicas, client)
    finally:
        await client.close()
        for one in replicas:
            await one.stop()
        await router.stop()
