from __future__ import annotations

import pytest

from appliance.errors import ConfigError
from appliance.tui.server import Server, server_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
        ("http://box.local:8080/", "http://box.local:8080/"),
        ("https://box/v1", "https://box/"),
        ("https://box/llm/v1/", "https://box/llm"),
        ("http://[::1]:9", "http://[::1]:9/"),
    ],
)
def test_addresses_as_people_write_them(text: str, url: str) -> None:
    assert str(server_url(text)) == url


@pytest.mark.parametrize("text", ["", "http://", "ftp://box", "http://box:port", "http://[::1"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        server_url(text)


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_a_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Server.at("http://127.0.0.1:1", key)


def test_a_key_stands_in_no_traceback() -> None:
    assert "secret" not in repr(Server.at("http://127.0.0.1:1", "secret"))


def test_paths_follow_the_root() -> None:
    server = Server.at("https://box/llm/v1", None)
    assert str(server.path("/metrics")) == "https://box/llm/metrics"
