"""Files of tokens, tenants, secrets and certificates, and the table of who may call what."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.config import ReplicaConfig, RouterConfig, from_mapping
from cluster.errors import Unauthenticated
from cluster.security.access import GENERATE, LOOK, STEER, roles_for
from cluster.security.caller import Role
from cluster.security.certs import CertificateFolder, CertRole, check_hosts
from cluster.security.config import ClientSecurity, SecurityConfig
from cluster.security.guard import Guard
from cluster.security.local_secret import LocalSecret
from cluster.security.secret_file import read_secret, write_secret
from cluster.security.tenants import add_token, read_tenants, revoke_token
from cluster.security.tls import ServerCertificates, read_pems
from cluster.security.tokens import Credential, bearer, create_token, credential_of, digest, token_id
from cluster.security.watched_file import WatchedFiles
from protos import control_pb2, generation_pb2, replica_pb2
from tests.fakes.command_line import graphpool
from tests.fakes.secured import secured


def test_a_token_matches_its_own_hash_alone() -> None:
    token, other = create_token(), create_token()
    credential = credential_of(token)
    assert credential.matches(token)
    assert not credential.matches(other)
    assert not credential.matches("")
    assert token_id(token) == credential.id
    assert token not in repr(credential)
    assert credential.sha256 not in repr(credential)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {create_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert min(map(len, tokens)) >= 12 + 43


@pytest.mark.parametrize(
    "text", ["", "gp_", "gp_12345678_", "gp_1234567g_" + "a" * 43, "x" * 100, "gp_12345678_" + "ü" * 43]
)
def test_what_is_no_token_has_no_id_and_no_credential(text: str) -> None:
    assert token_id(text) is None
    with pytest.raises(ValueError, match="not a token"):
        credential_of(text)


def test_a_bearer_is_found_whatever_the_case_of_its_scheme() -> None:
    assert bearer([("x", "y"), ("authorization", "bearer  abc ")]) == "abc"
    assert bearer([("authorization", "Basic abc")]) == ""
    assert bearer([("authorization", b"Bearer abc")]) == ""
    assert bearer(None) == ""


def test_a_tenant_keeps_its_tokens_when_it_gets_another_and_loses_the_revoked_one(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    first = add_token(path, "acme", limits={"tokens_per_s": 10, "max_streams": 3})
    second = add_token(path, "acme", roles=(Role.USER, Role.OPERATOR))
    tenants = read_tenants(str(path))
    for token in (first, second):
        caller = tenants.caller(token)
        assert caller is not None
        assert (caller.tenant, caller.roles) == ("acme", frozenset((Role.USER, Role.OPERATOR)))
    assert tenants.by_name["acme"].quota.max_streams == 3
    assert revoke_token(path, token_id(first) or "") == "acme"
    tenants = read_tenants(str(path))
    assert tenants.caller(first) is None
    assert tenants.caller(second) is not None
    with pytest.raises(ValueError, match="no token has the id"):
        revoke_token(path, "ffffffff")


def test_tokens_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    with ThreadPoolExecutor(8) as threads:
        tokens = list(threads.map(lambda number: add_token(path, f"t{number % 3}"), range(24)))
    tenants = read_tenants(str(path))
    assert all(tenants.caller(token) for token in tokens)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "is not YAML"),
        ("- a", "must hold `tenants:`"),
        ("tenants: {}\nother: 1", "must hold `tenants:`"),
        ("tenants: {1: {}}", "must hold `tenants:`"),
        ("tenants: {a: 7}", "'a' must be a mapping"),
        ("tenants: {a: {role: user}}", "tenant a has role"),
        ("tenants: {a: {roles: [router]}}", "role 'router' of tenant a is not one of"),
        ("tenants: {a: {roles: []}}", "tenant a has no roles"),
        ("tenants: {a: {tokens: [x]}}", "must have id and sha256"),
        ("tenants: {a: {tokens: [{id: '1', sha256: '2'}]}}", "not 8 hexadecimal digits"),
        (f"tenants: {{a: {{tokens: [{{id: '12345678', sha256: {'g' * 64}}}]}}}}", "is not 64 hexadecimal digits"),
        ("tenants: {a: {tokens_per_s: many}}", "tokens_per_s of tenant a is not a number"),
        ("tenants: {a: {tokens_per_s: true}}", "tokens_per_s of tenant a is not a number"),
        ("tenants: {a: {tokens_per_s: -5}}", "tokens_per_s -5.0 is not a positive number"),
        ("tenants: {a: {weight: 0}}", "weight 0.0 of tenant a"),
        ("tenants: {'a b': {}}", "must be 1 to 64 letters"),
        ("tenants: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("tenants: 2001-99-99", "is not YAML"),
        pytest.param("tenants: " + "[" * 5000, "is not YAML", id="too-deep"),
    ],
)
def test_a_file_of_tenants_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_tenants(str(path))


def test_one_id_cannot_be_two_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    entry = f"[{{id: '12345678', sha256: {'a' * 64}}}]"
    path.write_text(f"tenants: {{a: {{tokens: {entry}}}, b: {{tokens: {entry}}}}}")
    with pytest.raises(ValueError, match="two tokens have the id 12345678"):
        read_tenants(str(path))


def test_an_edit_that_would_break_the_file_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    add_token(path, "acme")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        add_token(path, "not a name")
    with pytest.raises(ValueError, match="is not a positive number"):
        add_token(path, "acme", limits={"tokens_per_s": -1})
    assert path.read_bytes() == before


def test_a_secret_is_compared_whole_and_stands_for_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    guard = Guard(SecurityConfig(pool_token=str(path)))
    caller = guard.caller_of_token(read_secret(str(path)))
    assert (caller.tenant, caller.roles) == ("", frozenset((Role.ROUTER, Role.REPLICA)))
    for wrong in ("", "x", read_secret(str(path))[:-1], read_secret(str(path)) + "x", "ü"):
        with pytest.raises(Unauthenticated):
            guard.caller_of_token(wrong)


@pytest.mark.parametrize("content", ["", "short", "with a space in it, however long", "x" * 30 + "\n" + "y" * 30])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ValueError, match="must hold one line of at least 20"):
        read_secret(str(path))


def test_a_local_pool_makes_its_secret_only_where_somebody_is_asked(tmp_path: Path) -> None:
    keys = secured(tmp_path)
    open_pool = LocalSecret(SecurityConfig())
    assert open_pool.security == SecurityConfig()
    made = LocalSecret(SecurityConfig(tokens=str(keys.tenants)))
    path = Path(made.security.pool_token)
    assert read_secret(str(path))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    made.close()
    assert not path.exists()
    given = LocalSecret(keys.plain())
    assert given.security == keys.plain()


def test_a_changed_file_is_read_again_once_a_period_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    path = tmp_path / "number"
    path.write_text("1")
    watched = WatchedFiles([str(path)], lambda: int(path.read_text()), clock=lambda: now_s)
    path.write_text("22")
    assert watched.get() == 1
    now_s = 1.0
    assert watched.get() == 22
    assert watched.num_changes == 1
    path.write_text("broken")
    now_s = 2.0
    assert watched.get() == 22
    now_s = 3.0
    assert watched.get() == 22
    assert sum("cannot be used" in record.getMessage() for record in caplog.records) == 1
    path.unlink()
    now_s = 4.0
    assert watched.get() == 22
    path.write_text("333")
    now_s = 5.0
    assert watched.get() == 333


def test_every_method_of_the_contract_is_in_the_table_and_others_are_for_operators() -> None:
    listed = {}
    for module in (generation_pb2, control_pb2, replica_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                listed[f"{service.name}/{method.name}"] = roles_for(f"/{service.full_name}/{method.name}")
    assert {name: roles for name, roles in listed.items() if roles not in (LOOK, GENERATE)} == {
        "ControlService/Drain": STEER,
        "ReplicaService/Attach": (Role.ROUTER,),
        "MembershipService/Announce": (Role.REPLICA,),
    }
    assert roles_for("/unheard.of/Method") == roles_for("") == STEER


def test_a_certificate_holds_its_roles_its_hosts_and_an_end(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    folder = CertificateFolder(tmp_path / "certs")
    folder.create()
    path = folder.issue("pool", [CertRole.ROUTER, CertRole.REPLICA], ["a.example", "10.0.0.5", "::1"], days=7)
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "router.graphpool.internal",
        "replica.graphpool.internal",
        "a.example",
    ]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("::1")]
    assert 6.9 < (certificate.not_valid_after_utc - now).total_seconds() / 86400 < 7.1
    ca = x509.load_pem_x509_certificate((folder.folder / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(ca)
    with pytest.raises(FileExistsError):
        folder.create()
    for name in ("ca", "a/b", "", "x" * 65):
        with pytest.raises(ValueError, match="cannot be the name"):
            folder.issue(name, [CertRole.CLIENT])


@pytest.mark.parametrize("host", ["", "a b", "http://a", "a:50050", "ü.example", "a..b", "-a", "a,b", "x" * 64])
def test_a_host_that_no_certificate_can_name_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    result = CliRunner().invoke(app, ["certs", "init", str(tmp_path / "certs"), "--host", "a.example", "--host", host])
    assert result.exit_code == 1
    assert f"host {host!r:.60} is neither" in result.output
    assert not (tmp_path / "certs").exists()


def test_hosts_may_be_names_of_any_depth_wildcards_and_addresses() -> None:
    check_hosts(["a", "node-7.local", "*.example.com", "_x.a", "10.0.0.5", "fe80::1", "router.graphpool.internal"])


def test_renewal_keeps_names_and_changes_keys(tmp_path: Path) -> None:
    keys = secured(tmp_path)
    before = (keys.folder / "router.pem").read_bytes(), (keys.folder / "router-key.pem").read_bytes()
    assert keys.certificates.renew() == ["client", "replica", "router"]
    after = (keys.folder / "router.pem").read_bytes(), (keys.folder / "router-key.pem").read_bytes()
    old, new = (x509.load_pem_x509_certificate(pem) for pem in (before[0], after[0]))
    kind = x509.SubjectAlternativeName
    assert old.extensions.get_extension_for_class(kind) == new.extensions.get_extension_for_class(kind)
    assert (before[0] != after[0], before[1] != after[1]) == (True, True)
    read_pems(str(keys.folder / "router.pem"), str(keys.folder / "router-key.pem"), str(keys.folder / "ca.pem"))


def test_a_certificate_that_ends_soon_is_told_of_twice_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = secured(tmp_path)
    keys.certificates.issue("router", [CertRole.ROUTER], days=13)
    times = [0.0]
    soon, later = (ServerCertificates(keys.server(name), clock=lambda: times[0]) for name in ("router", "replica"))
    for time_s in (0.0, 10.0, 13 * 3600.0):
        times[0] = time_s
        assert soon.pems.ends is not None
        assert later.pems.ends is not None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("router.pem ends in 13.0 days" in line for line in lines)


def test_a_secret_that_others_can_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = secured(tmp_path)
    files = [str(keys.folder / name) for name in ("router.pem", "router-key.pem", "ca.pem")]
    read_pems(*files)
    read_secret(str(keys.folder / "pool-token"))
    assert caplog.records == []
    for name in ("router-key.pem", "pool-token"):
        (keys.folder / name).chmod(0o644)
    read_pems(*files)
    read_secret(str(keys.folder / "pool-token"))
    assert [record.getMessage().partition(" can be ")[2] for record in caplog.records] == [
        "read by others than its owner (mode 644)"
    ] * 2


def test_a_reader_never_meets_half_a_file(tmp_path: Path) -> None:
    keys = secured(tmp_path, acme={})
    stop, problems = threading.Event(), []

    def read_forever() -> None:
        while not stop.is_set():
            try:
                read_tenants(str(keys.tenants))
                read_pems("", "", str(keys.folder / "ca.pem"))
            except (OSError, ValueError) as error:
                problems.append(error)

    reader = threading.Thread(target=read_forever)
    reader.start()
    for number in range(20):
        add_token(keys.tenants, f"t{number}")
        keys.certificates.add_ca()
    stop.set()
    reader.join()
    assert problems == []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tls_cert": "a"}, "tls_cert and tls_key go together"),
        ({"tls_key": "a"}, "tls_cert and tls_key go together"),
        ({"tls_ca": "a"}, "tls_ca 'a' needs tls_cert"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SecurityConfig(**values)  # type: ignore[arg-type]


def test_settings_come_from_a_file_like_all_others() -> None:
    config = from_mapping(RouterConfig, {"security": {"tokens": "t.yaml", "client_certs": False}})
    assert config.security == SecurityConfig(tokens="t.yaml", client_certs=False)
    with pytest.raises(ValueError, match="SecurityConfig has no 'token'"):
        from_mapping(ReplicaConfig, {"security": {"token": "x"}})


def test_a_clients_token_is_in_no_repr_and_must_be_printable() -> None:
    assert "secret" not in repr(ClientSecurity(token="secret"))
    for token in ("a b", "a\n", "ü"):
        with pytest.raises(ValueError, match="token is not one of printable"):
            ClientSecurity(token=token)


def test_a_credential_that_is_no_hash_is_refused_without_being_quoted() -> None:
    with pytest.raises(ValueError, match="sha256 of token 12345678") as caught:
        Credential("12345678", "plain-secret")
    assert "plain-secret" not in str(caught.value)
    assert Credential("12345678", digest("x"))


def test_the_commands_make_what_the_servers_read(tmp_path: Path) -> None:
    folder, file = tmp_path / "certs", tmp_path / "tenants.yaml"
    made = graphpool("certs", "init", str(folder), "--host", "router.example")
    assert made.returncode == 0, made.stderr
    assert graphpool("certs", "init", str(folder)).returncode == 1
    assert graphpool("certs", "issue", str(folder), "client", "--name", "laptop").stdout.strip().endswith("laptop.pem")
    assert graphpool("certs", "issue", str(folder), "king").returncode == 2
    assert "laptop.pem" in graphpool("certs", "rotate", str(folder)).stdout
    read_pems(*(str(folder / name) for name in ("laptop.pem", "laptop-key.pem", "ca.pem")))
    created = graphpool("tokens", "create", "acme", "--file", str(file), "--tokens-per-s", "50", "--max-streams", "2")
    token = created.stdout.strip()
    assert created.returncode == 0
    assert read_tenants(str(file)).caller(token)
    assert (
        f"acme  user  50 tokens/s  2 streams  tokens: {token_id(token)}"
        in graphpool("tokens", "list", "--file", str(file)).stdout
    )
    assert graphpool("tokens", "create", "acme", "--file", str(file), "--role", "king").returncode == 2
    assert graphpool("tokens", "revoke", token_id(token) or "", "--file", str(file)).returncode == 0
    assert read_tenants(str(file)).caller(token) is None
    assert graphpool("tokens", "pool", str(tmp_path / "secret")).returncode == 0
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
