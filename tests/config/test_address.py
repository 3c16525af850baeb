from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.own_config import WriteConfig

from appliance.config import local_url, network_url, server_to_watch
from appliance.errors import ConfigError

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080"),
        ("192.168.1.4", "http://192.168.1.4:8080"),
        ("fd00::1", "http://[fd00::1]:8080"),
        ("box.lan", "http://box.lan:8080"),
    ],
)
def test_an_address_that_can_be_opened_here(host: str, url: str) -> None:
    assert local_url(host, 8080) == url


def test_other_machines_have_an_address_only_where_all_are_listened_on() -> None:
    assert network_url("127.0.0.1", 80) is None
    assert network_url("192.168.1.4", 80) is None
    found = network_url("0.0.0.0", 80)
    assert found is None or (found.endswith(":80") and "0.0.0.0" not in found)


def test_without_settings_it_is_the_usual_address_and_no_key() -> None:
    assert server_to_watch(None) == ("http://127.0.0.1:8080", None)


def test_port_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_PORT", "9000")
    monkeypatch.setenv("APPLIANCE_API_KEY", KEY)
    assert server_to_watch(None) == ("http://127.0.0.1:9000", KEY)
    assert server_to_watch("gpu.lan:8000") == ("gpu.lan:8000", KEY)


def test_address_and_key_come_from_the_configuration(write_config: WriteConfig) -> None:
    path = write_config(f"[server]\nhost = '0.0.0.0'\nport = 9000\napi_key = '{KEY}'\n")
    for named in (None, path):
        assert server_to_watch(None, named) == ("http://127.0.0.1:9000", KEY)


def test_a_configured_key_goes_to_the_configured_server_only(write_config: WriteConfig) -> None:
    write_config(f"[server]\nport = 9000\napi_key = '{KEY}'\n")
    for here in ("http://127.0.0.1:9000", "localhost:9000", "http://[::1]:9000/v1"):
        assert server_to_watch(here) == (here, KEY)
    for elsewhere in ("http://127.0.0.1:8000", "http://gpu.lan:9000", "localhost", "http://[:"):
        assert server_to_watch(elsewhere) == (elsewhere, None)


def test_a_key_may_come_from_the_key_file(write_config: WriteConfig, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"anna={KEY}\n")
    keys.chmod(0o600)
    write_config(f"[server]\napi_key_file = '{keys}'\n")
    assert server_to_watch(None)[1] == KEY
    keys.write_text(f"anna={KEY}\nben={KEY[::-1]}\n")
    assert server_to_watch(None)[1] is None, "of several, a person chooses"
    keys.write_text(f"anna={KEY}\nben={KEY[::-1]}\n{KEY}{KEY}\n")
    assert server_to_watch(None)[1] == KEY + KEY, "but for the one that manages everything"


def test_a_key_of_the_environment_needs_no_key_file(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config("[server]\napi_key_file = '/nowhere/keys'\n")
    with pytest.raises(ConfigError, match="/nowhere/keys cannot be read"):
        server_to_watch(None)
    monkeypatch.setenv("APPLIANCE_API_KEY", KEY)
    assert server_to_watch(None) == ("http://127.0.0.1:8080", KEY)
