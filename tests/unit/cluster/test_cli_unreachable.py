"""What a person reads when a server cannot be reached, against servers that really refuse."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from tests.fakes.command_line import read_until, running


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["status", *arguments])
    assert done.exit_code == 1
    return done.stderr.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    for name in ("own", "foreign"):
        assert CliRunner().invoke(app, ["certs", "init", str(folder / name), "--host", "localhost"]).exit_code == 0
    return folder


def client_files(folder: Path) -> tuple[str, ...]:
    return (
        "--tls-ca",
        f"{folder}/ca.pem",
        "--tls-cert",
        f"{folder}/client.pem",
        "--tls-key",
        f"{folder}/client-key.pem",
    )


@pytest.fixture(scope="module")
def tls_port(folder: Path) -> Iterator[str]:
    own = folder / "own"
    files = ("--tls-cert", f"{own}/pool.pem", "--tls-key", f"{own}/pool-key.pem", "--tls-ca", f"{own}/ca.pem")
    with running("router", "--port", "0", *files, stderr=subprocess.PIPE) as router:
        yield read_until(router, r"router at 127\.0\.0\.1:(\d+)")[1]


@pytest.fixture(scope="module")
def plain_port() -> Iterator[str]:
    with running("router", "--port", "0", stderr=subprocess.PIPE) as router:
        yield read_until(router, r"router at 127\.0\.0\.1:(\d+)")[1]


def test_a_server_that_wants_tls_hangs_up_on_others(tls_port: str) -> None:
    assert "does it want TLS" in said("--address", f"localhost:{tls_port}")


def test_a_server_that_wants_a_certificate_is_not_called_dead(tls_port: str, folder: Path) -> None:
    found = said("--address", f"localhost:{tls_port}", "--tls-ca", f"{folder}/own/ca.pem")
    assert "or a certificate of yours" in found


def test_certificates_of_another_ca_are_named(tls_port: str, folder: Path) -> None:
    found = said("--address", f"localhost:{tls_port}", *client_files(folder / "foreign"))
    assert found.startswith("the CAs of --tls-ca did not sign the server's certificate")


def test_a_server_without_tls_is_named(plain_port: str, folder: Path) -> None:
    found = said("--address", f"localhost:{plain_port}", *client_files(folder / "own"))
    assert found == "the server at that address speaks no TLS: leave out --tls-ca"


def test_a_name_that_nobody_knows_is_named() -> None:
    assert said("--address", "nobody.invalid:50050") == "the name in --address cannot be looked up"


def test_a_port_that_speaks_http_is_no_grpc_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "does not speak gRPC" in said("--address", f"127.0.0.1:{server.getsockname()[1]}")
