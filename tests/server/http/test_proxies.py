"""A reverse proxy in front: the client that it forwards for, and the path that it adds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from appliance.config import ServerConfig
from appliance.errors import ConfigError
from appliance.server.http import access_log
from appliance.server.http.keys import BURST
from appliance.server.http.proxies import Proxies, root_path

if TYPE_CHECKING:
    from tests.server.conftest import Serve


@pytest.fixture(autouse=True)
def _level_as_before() -> None:
    logging.getLogger(access_log.__name__).setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("trusted", "header", "client"),
    [
        ("", "203.0.113.9", "127.0.0.1"),
        ("192.0.2.7", "203.0.113.9", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.0/8, ::1", "6.6.6.6, 203.0.113.9", "203.0.113.9"),
        ("127.0.0.1,10.0.0.0/8", "6.6.6.6, 203.0.113.9, 10.0.0.3", "203.0.113.9"),
        ("127.0.0.1", "", "127.0.0.1"),
    ],
)
async def test_only_a_trusted_proxy_says_who_asks(
    serve: Serve, caplog: pytest.LogCaptureFixture, trusted: str, header: str, client: str
) -> None:
    config = {"trusted_proxies": trusted, "access_log": True}
    async with serve(server=config, headers={"x-forwarded-for": header}) as running:
        assert (await running.http.get("/v1/models")).status_code == 200
    lines = [one.getMessage() for one in caplog.records if one.name == access_log.__name__]
    assert [line.split()[0] for line in lines] == [client]


async def test_wrong_keys_are_counted_by_who_sends_them(serve: Serve) -> None:
    config = {"api_key": "the-right-key", "trusted_proxies": "127.0.0.1"}

    async def status(running: Any, client: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": client}
        return int((await running.http.get("/v1/models", headers=headers)).status_code)

    async with serve(server=config) as running:
        for number in range(BURST):
            assert await status(running, "203.0.113.9", f"wrong-{number}") == 401
        assert await status(running, "203.0.113.9", "wrong") == 429
        assert await status(running, "203.0.113.10", "the-right-key") == 200
        assert await status(running, "203.0.113.9", "the-right-key") == 200


@pytest.mark.parametrize("cut_off", [True, False])
async def test_under_a_path_everything_is_as_at_the_root(serve: Serve, cut_off: bool) -> None:
    prefix = "" if cut_off else "/llm/here"
    async with serve(server={"root_path": "/llm/here/", "api_key": "the-right-key"}) as running:
        http = running.http
        for path in ("/", "/health", "/docs", "/docs/topics.txt", "/page.css"):
            assert (await http.get(f"{prefix}{path}")).status_code == 200, path
        for path in ("/v1/models", "/llm/v1/models", "/metrics"):
            assert (await http.get(f"{prefix}{path}")).status_code == 401, "the door is there"
        http.headers["authorization"] = "Bearer the-right-key"
        body = {"prompt": "hi", "max_tokens": 2}
        answer = await http.post(f"{prefix}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "hi"
        document = (await http.get(f"{prefix}/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm/here"}]
        assert "/v1/models" in document["paths"]
        moved = await http.get("/llm/here")
        assert (moved.status_code, moved.headers["location"]) == (308, "/llm/here/")
        assert (await http.get("/llm/herewego")).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/a b", "/a?b", "/a#b", "/a%2fb", "//host/a", "/a\\b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="write it like /llm"):
        root_path(ServerConfig(root_path=path))


@pytest.mark.parametrize("text", ["proxy.example", "10.0.0.0/40", "*", "10.0.0.1/8"])
def test_what_is_no_address_is_refused(text: str) -> None:
    async def app(*_: Any) -> None: ...

    with pytest.raises(ConfigError, match="no address or network"):
        Proxies(app, ServerConfig(trusted_proxies=f"127.0.0.1, {text}"))
