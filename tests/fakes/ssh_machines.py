"""What `ray up` needs on machines: SSH with a throw-away key, and an environment with graphpool in it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fakes.command_line import ROOT
from tests.fakes.machines import HOME, Machine
from worker.model.cache import default_cache_dir
from worker.model.embedded import EMBEDDED_MODEL
from worker.model.source import resolve_model

ENVIRONMENT = HOME / "graphpool-env"
TOKEN = "7" * 64
WHEEL = b"nobody unpacks it: the environments are up to date"
SSHD_CONFIG = """
ListenAddress 0.0.0.0
HostKey /tmp/host_key
PidFile none
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
"""
SCRIPTS = {
    "ray": "from ray.scripts.scripts import main",
    "serve": "from ray.serve.scripts import cli as main",
    "graphpool": "from cluster.cli import main",
}


def generate_key(path: Path) -> None:
    """An SSH key without a passphrase."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def start_sshd(machine: Machine, key: Path) -> None:
    """Let the owner of `key` log in. The server ends with the machine."""
    generate_key(machine.folder / "tmp" / "host_key")
    (machine.home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copy(key.with_suffix(".pub"), machine.home / ".ssh" / "authorized_keys")
    (machine.folder / "tmp" / "sshd_config").write_text(SSHD_CONFIG)
    machine.shell(f"{shutil.which('sshd')} -E /tmp/sshd.log -f /tmp/sshd_config")


def make_environment(machine: Machine) -> None:
    """~/graphpool-env as deploy/node/setup.sh leaves it, but out of this checkout and this environment."""
    machine.shell(f"{sys.executable} -m venv --without-pip {ENVIRONMENT}")
    place = machine.home / ENVIRONMENT.name
    (packages,) = place.glob("lib/python*/site-packages")
    library = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "checkout.pth").write_text(f"{library}\n{ROOT}\n")
    for name, imported in SCRIPTS.items():
        script = place / "bin" / name
        script.write_text(f"#!{ENVIRONMENT}/bin/python\nimport sys\n{imported}\nsys.exit(main())\n")
        script.chmod(0o755)
    (place / "installed").write_text(setup_stamp())
    cache = machine.home / ".cache"
    cache.mkdir()
    resolve_model(EMBEDDED_MODEL)  # whoever comes first makes it, here and not within a machine's time to start
    (cache / "graphpool").symlink_to(default_cache_dir())


def setup_stamp(*packages: str) -> str:
    """What setup.sh notes down about an installed environment."""
    noted = WHEEL + (ROOT / "constraints.txt").read_bytes() + f"{' '.join(packages)}\n".encode()
    return f"{hashlib.sha256(noted).hexdigest()}  -\n"


def make_checkout(machine: Machine) -> Path:
    """What an operator runs `ray up` from: the deploy folder, a wheel, the pins, a token. Its path, as seen from outside."""
    checkout = machine.home / "checkout"
    shutil.copytree(ROOT / "deploy", checkout / "deploy")
    shutil.copy(ROOT / "constraints.txt", checkout)
    (checkout / "dist").mkdir()
    (checkout / "dist" / "graphpool-0.1.0-py3-none-any.whl").write_bytes(WHEEL)
    (machine.home / ".ray").mkdir()
    (machine.home / ".ray" / "auth_token").write_text(TOKEN)
    return checkout
