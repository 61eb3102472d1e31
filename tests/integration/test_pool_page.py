from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.script_pool import FAST, ScriptPool, script_pool

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=4000"),
)


@pytest.fixture
async def pool() -> AsyncIterator[ScriptPool]:
    async with script_pool(router=replace(FAST, metrics_listen="127.0.0.1:0")) as made:
        yield made


async def get(pool: ScriptPool, path: str, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    def ask() -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(f"http://{pool.router.metrics_address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    return await asyncio.to_thread(ask)


async def test_the_numbers_of_the_page_are_those_of_the_pool(pool: ScriptPool) -> None:
    await pool.client.generate([5, 6, 7], max_tokens=3)
    status, body, headers = await get(pool, "/pool.json")
    values = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert values["totals"]["num_ready"] == len(pool.replicas)
    assert {one["replica"] for one in values["replicas"]} == set(pool.states)
    assert values["server"]["role"] == "router"


async def test_the_page_takes_nothing_from_elsewhere_and_metrics_are_where_they_were(pool: ScriptPool) -> None:
    status, body, headers = await get(pool, "/")
    assert status == 200
    assert b"<title>graphpool</title>" in body
    assert not re.search(rb"https?://", body)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"graphpool_placements_total" in (await get(pool, "/metrics"))[1]
    assert (await get(pool, "/pool.json", "POST"))[0] == 405
    assert (await get(pool, "/", "HEAD"))[:2] == (200, b"")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
async def test_a_browser_shows_every_replica_and_the_totals(pool: ScriptPool, tmp_path: Path) -> None:
    await pool.client.generate([5, 6, 7], max_tokens=3)
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *QUIET, f"--user-data-dir={tmp_path}", "--dump-dom", f"http://{pool.router.metrics_address}/"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 90)
    page = out.decode()
    for name in pool.states:
        assert f"<td>{name}</td>" in page
    assert f"<dd>{len(pool.replicas)}/{len(pool.replicas)}</dd>" in page
    assert '<td class="READY">READY</td>' in page
    assert re.search(r'points="0,[\d.]+', page)
    assert 'id="stale" role="status" hidden' in page
