"""`appliance top --web` as a process, with clients and a browser."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from aiohttp import web
from support.runs.waiting import LIMIT, until
from support.server.browser import chromium, opened
from typer.testing import CliRunner

from appliance.cli import app
from appliance.config import ServerConfig
from appliance.errors import ConfigError
from appliance.server.dashboard.web_dashboard import (
    COOKIE,
    MAX_TICKETS,
    TICKET_SECONDS,
    Tickets,
    WebDashboard,
)
from appliance.server.http.listener import bind, url_of
from tests.server.conftest import NO_AUTHORITIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Serve

KEY = "dashboard-key"


@asynccontextmanager
async def dashboard(*arguments: str, key: str) -> AsyncIterator[tuple[str, int]]:
    """Address and process id of `appliance top --web`."""
    environment = {name: value for name, value in os.environ.items() if "APPLIANCE_" not in name}
    environment["APPLIANCE_API_KEY"] = key
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "appliance", "top", "--web", "--web-port", "0", *arguments,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(LIMIT):
            line = (await process.stderr.readline()).decode()
            found = re.search(r"is at (http://\S+)/$", line.strip())
            assert found is not None, line + (await process.stderr.read()).decode()
        yield found[1], process.pid
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT):
            assert await process.wait() == 0, "a signal ends it cleanly"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def door(key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same server in this process."""
    config = ServerConfig(port=0, api_key=key)
    runner = web.AppRunner(await WebDashboard((), config)._make_app())
    await runner.setup()
    try:
        with bind(config) as sock:
            await web.SockSite(runner, sock).start()
            async with httpx.AsyncClient(
                base_url=url_of(config, sock), timeout=LIMIT, verify=NO_AUTHORITIES
            ) as http:
                yield http
    finally:
        await runner.cleanup()


async def test_every_path_wants_the_key_and_a_ticket_is_as_good() -> None:
    async with door(KEY) as http:
        for path in ("/", "/ws", "/static/js/textual.js", "/download/x", "/nothing"):
            response = await http.get(path)
            assert response.status_code == 401, path
            assert "password" in response.text
        in_address = await http.get("/", params={"key": KEY})
        assert in_address.status_code == 401, "it would stand in histories and logs"
        assert "set-cookie" not in in_address.headers
        for wrong in ("wrong", "", "\N{SNOWMAN}"):
            assert (await http.post("/", data={"key": wrong})).status_code == 401
        bearer = {"authorization": f"Bearer {KEY}"}
        assert (await http.get("/", headers=bearer)).status_code == 200
        assert (await http.get("/")).status_code == 401
        forged = {"cookie": f"{COOKIE}=forged"}
        assert (await http.get("/", headers=forged)).status_code == 401

        admitted = await http.post("/", data={"key": KEY})
        assert (admitted.status_code, admitted.headers["location"]) == (303, "/")
        cookie = admitted.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert KEY not in cookie
        assert f"Max-Age={TICKET_SECONDS}" in cookie
        page = await http.get("/")
        assert page.status_code == 200
        assert f"ws://{http.base_url.netloc.decode()}/ws" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_names_and_pages_of_others_are_refused() -> None:
    async with door() as http:
        assert (await http.get("/")).status_code == 200, "this machine needs no key"
        assert (await http.get("/", headers={"host": "evil.example"})).status_code == 403
        upgrade = {
            "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
            "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==", "origin": "http://evil.example",
        }  # fmt: skip
        assert (await http.get("/ws", headers=upgrade)).status_code == 403
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await http.get("/download/x", headers=image)).status_code == 403
        assert (await http.get("/", headers=image)).status_code == 200, "a link to it works"


def test_tickets_end_and_are_not_kept() -> None:
    now = 0.0
    tickets = Tickets(clock=lambda: now)
    first = tickets.issue()
    assert tickets.knows(first)
    assert not any(map(tickets.knows, ("", "forged", first[:-1], "\N{SNOWMAN}", "\ud800")))
    now = TICKET_SECONDS - 1
    second = tickets.issue()
    assert tickets.knows(first)
    now = TICKET_SECONDS
    assert not tickets.knows(first)
    assert tickets.knows(second)
    latest = [tickets.issue() for _ in range(MAX_TICKETS)]
    assert not tickets.knows(second), "the oldest goes first"
    assert all(map(tickets.knows, latest))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_not_let_in_without_a_key(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
        monkeypatch.delenv(name)
    ended = CliRunner().invoke(app, ["top", "--web", "--web-host", host])
    assert isinstance(ended.exception, ConfigError)
    assert "an API key is needed" in str(ended.exception)
    assert ServerConfig(host=host).api_key is None


async def test_a_browser_shows_the_dashboard_and_its_process_ends_with_the_tab(
    serve: Serve, tmp_path: Path
) -> None:
    async with (
        chromium() as browser,
        serve("step_seconds=0.01", server={"api_key": KEY}) as running,
        dashboard("--url", running.url, key=KEY) as (url, pid),
        opened(browser, url) as (page, complaints),
    ):
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Watch").click()
        await page.locator("body.-first-byte").wait_for()
        process = psutil.Process(pid)
        await until(lambda: len(process.children(recursive=True)) > 0)
        watched = b'route="/admin/v1/events",status="200"'
        await until(lambda: watched in running.server.metrics.render())
        screen = tmp_path / "screen.png"

        async def is_full() -> bool:
            await page.screenshot(path=screen)
            return screen.stat().st_size > 15_000  # an empty terminal compresses far better

        await until(is_full, "the dashboard on the terminal")
        others = [text for text in complaints if "401" not in text and "googleapis" not in text]
        assert others == []
        assert "key=" not in page.url
        await page.close()
        await until(lambda: not process.children(recursive=True))
