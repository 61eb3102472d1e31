"""A whole pool under Ray, with everything on: TLS, client certificates, tokens and a secret it makes by itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.client import AsyncGraphpoolClient, Unauthenticated, Unavailable
from cluster.config import ClientConfig, RouterConfig
from cluster.local_pool import LocalPool, LocalPoolConfig
from cluster.security.certs import CertRole
from cluster.security.secret_file import read_secret
from tests.fakes.secured import HOSTS, secured
from worker.config import WorkerConfig

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.mark.ray
@pytest.mark.slow
async def test_s1_to_s3_a_pool_under_ray_is_as_closed_as_its_router(tmp_path: Path) -> None:
    keys = secured(tmp_path, acme={})
    keys.certificates.issue("pool", [CertRole.ROUTER, CertRole.REPLICA], HOSTS)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    worker = WorkerConfig(model=str(model), load_format="dummy", device="cpu", cpu_threads=1, max_batch=2)
    router = RouterConfig(listen="127.0.0.1:0", security=keys.server("pool"))
    config = LocalPoolConfig(worker=worker, router=router, num_replicas=1, start_timeout_s=240)
    async with LocalPool(config) as pool:
        secret = Path(pool._secret.security.pool_token)
        assert read_secret(str(secret))
        (replica,) = pool.ready()
        for address in (pool.address, replica.address):
            for security, error in (
                (keys.client("acme"), None),
                (keys.client(), Unauthenticated),
                (keys.client("acme", cert=""), Unavailable),
            ):
                async with AsyncGraphpoolClient(address, ClientConfig(max_attempts=1, security=security)) as client:
                    if error is None:
                        answer = await client.generate((1, 2, 3), max_tokens=4, ignore_eos=True, timeout_s=60)
                        assert len(answer.choices[0].token_ids) == 4
                    else:
                        with pytest.raises(error):
                            await client.generate((1, 2, 3), max_tokens=4, timeout_s=60)
    assert not await asyncio.to_thread(secret.exists)
