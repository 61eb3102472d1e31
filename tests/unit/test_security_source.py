"""S4, S5 and S7 as the source shows them: nothing that runs what it reads, and no Ray for others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "worker", "protos", "deploy")
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "code",
    "zmq",
}
OWN_PIPES = {"worker/kernels/build_job.py"}
"""Both ends of the way from a worker to the processes that it has forked to compile kernels; nothing else can write into
it, and nothing that comes back is read so."""
FORBIDDEN_CALLS = {
    "torch.load": "reads pickles",
    "numpy.load": "may read pickles",
    "np.load": "may read pickles",
    "yaml.load": "may make any object",
    "yaml.unsafe_load": "makes any object",
    "yaml.full_load": "makes many objects",
    "pandas.read_pickle": "reads pickles",
    "eval": "runs text",
    "exec": "runs text",
    "compile": "makes code of text",
    "__import__": "imports what a text says",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "ray.cloudpickle.loads": "reads pickles",
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "allow_pickle"}
SECRET_PORTS = ("8265", "10001", "6379", "8000", "9000")


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def problems(source: str) -> Iterator[str]:
    """What a module must not do, by line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{line}: imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN_CALLS:
                yield f"{line}: {name} {FORBIDDEN_CALLS[name]}"
            for keyword in node.keywords:
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_false(keyword.value):
                    yield f"{line}: {keyword.arg} is not False"
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_METHODS:
            yield f"{line}: {node.attr}"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_s5_no_module_of_ours_reads_pickles_or_runs_text() -> None:
    found = {str(path.relative_to(ROOT)): list(problems(path.read_text(encoding="utf-8"))) for path in sources()}
    assert len(found) > 150
    for path in OWN_PIPES:
        assert {line.partition(": ")[2] for line in found.pop(path)} == {"imports pickle"}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import ray.cloudpickle as p\np.x\nimport cloudpickle",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x')",
        "socket.recv_pyobj()",
        "eval('1')",
        "import yaml\nyaml.load(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "subprocess.run(x, shell=True)",
        "import os\nos.system('x')",
    ],
)
def test_s5_the_check_finds_what_it_looks_for(source: str) -> None:
    assert list(problems(source))


def test_s7_transformers_is_never_allowed_to_run_a_models_code() -> None:
    calls = 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            if name.startswith("Auto") and name.split(".")[-1] in ("from_pretrained", "from_config"):
                assert isinstance(node, ast.Call)
                calls += 1
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                assert is_false(given["trust_remote_code"]), (path, node.lineno)
    assert calls >= 3


def test_s4_the_private_ray_of_a_pool_has_a_token_loopback_and_no_dashboard() -> None:
    source = (ROOT / "cluster" / "private_ray.py").read_text(encoding="utf-8")
    given = {
        keyword.arg: keyword.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    assert is_false(given["include_dashboard"])
    assert "RAY_AUTH_MODE" in source
    assert "127.0.0.1" in source


def documents() -> list[tuple[Path, Any]]:
    found = []
    for path in sorted([*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "deploy").rglob("*.yml")]):
        found += [(path, one) for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return found


def values(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from values(value, (*path, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from values(value, path)
    else:
        yield path, node


def exposed(document: Any) -> list[str]:
    """What a deployment file opens to others that must stay closed."""
    found = []
    for path, value in values(document):
        text, key = str(value), path[-1] if path else ""
        if "dashboard-host" in text and "0.0.0.0" in text:
            found.append(f"{'.'.join(path)}: {text[:80]}")
        if key in ("dashboard_host", "dashboard-host") and text not in ("127.0.0.1", "localhost", "::1"):
            found.append(f"{'.'.join(path)}: {text}")
        if key in ("FromPort", "ToPort", "hostPort", "nodePort") and text in SECRET_PORTS:
            found.append(f"{'.'.join(path)}: {text}")
        if "ray-client-server-port" in text and not any(
            f"ray-client-server-port{mark}0" in text for mark in ("=", " ")
        ):
            found.append(f"{'.'.join(path)}: {text[:80]}")
    return found


def test_s4_no_deployment_file_opens_rays_own_ports_to_others() -> None:
    fenced = {path.parent for path, document in documents() if (document or {}).get("kind") == "NetworkPolicy"}
    found = {path: exposed(document) for path, document in documents() if path.parent not in fenced}
    assert found
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_s4_on_kubernetes_a_policy_lets_nobody_but_the_pool_near_ray() -> None:
    policies = [one["spec"] for _, one in documents() if (one or {}).get("kind") == "NetworkPolicy"]
    assert policies
    for policy in policies:
        assert "Ingress" in policy["policyTypes"]
        for rule in policy.get("ingress", []):
            ports = {str(port["port"]) for port in rule.get("ports", [])}
            assert rule.get("from") or (ports and ports.isdisjoint(SECRET_PORTS)), rule


@pytest.mark.parametrize(
    "text",
    [
        "head_start_ray_commands: [ray start --head --dashboard-host=0.0.0.0]",
        "rayStartParams: {dashboard-host: '0.0.0.0'}",
        "IpPermissions: [{FromPort: 8265, ToPort: 8265}]",
        "ports: [{hostPort: 6379}]",
        "x: [ray start --head --ray-client-server-port=10001]",
    ],
)
def test_s4_the_check_of_deployment_files_finds_what_it_looks_for(text: str) -> None:
    assert exposed(yaml.safe_load(text))
