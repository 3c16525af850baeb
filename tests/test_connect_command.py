"""`appliance connect` as a person calls it; tests/connect tests each set-up."""

from __future__ import annotations

import json

import pytest
from support.runs.own_config import WriteConfig, clean_environment, write_config
from typer.testing import CliRunner, Result

from appliance.cli import app
from appliance.connect import RECIPES
from appliance.docs import read
from appliance.doctor.server_facts import ServerFacts

__all__ = ["clean_environment", "write_config"]
KEY = "0123456789abcdef"
pytestmark = pytest.mark.usefixtures("clean_environment")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["connect", *arguments])


def test_without_a_name_all_are_listed() -> None:
    listed = call().stdout
    assert all(f"{name} " in listed for name in RECIPES)


def test_an_unknown_name_has_a_nearest() -> None:
    assert "did you mean 'open-webui'" in str(call("openwebui").exception)


def test_address_key_and_model_are_those_of_the_settings(write_config: WriteConfig) -> None:
    write_config(f"[server]\nport = 9\napi_key = '{KEY}'\nserved_model_name = 'mine'\n")
    result = call("opencode", "--code")
    provider = json.loads(result.stdout)["provider"]["home"]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:9/v1", "apiKey": KEY}
    assert provider["models"] == {"mine": {}}
    assert "note: no answer" in result.stderr, "beside the file that standard output goes to"
    result = call("opencode")
    assert "note: no answer" in result.stderr
    assert result.exit_code == 0


def test_the_key_is_not_for_a_server_elsewhere(write_config: WriteConfig) -> None:
    write_config(f"[server]\nport = 9\napi_key = '{KEY}'\n")
    assert KEY in call("curl").stdout
    assert KEY not in call("curl", "--url", "http://192.0.2.1:9").stdout


def test_a_client_elsewhere_gets_an_address_that_it_can_reach(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config("[server]\nport = 9\n")
    assert "usually runs on another machine" in call("home-assistant").stderr
    write_config(f"[server]\nport = 9\nhost = '0.0.0.0'\napi_key = '{KEY}'\n")
    monkeypatch.setattr(
        "appliance.commands.connect.network_url", lambda host, port, tls: "http://192.0.2.7:9"
    )
    result = call("home-assistant")
    assert "http://192.0.2.7:9" in result.stdout
    assert "another machine" not in result.stderr


def test_a_client_that_is_set_up_by_hand_has_no_code() -> None:
    result = call("home-assistant", "--code")
    assert "set up by hand; `appliance connect home-assistant`" in str(result.exception)
    assert result.stdout == ""
    assert call("home-assistant").exit_code == 0


@pytest.mark.parametrize(("name", "least"), [("claude-code", 32768), ("home-assistant", 8192)])
def test_a_context_that_a_client_fills_soon_is_named(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/clients.md says how much agents want."""
    if name == "claude-code":
        assert f"{least:,} tokens or more" in read("clients").text
    for length, is_said in ((least, False), (least - 1, True)):

        async def answer(_: object, length: int = length) -> ServerFacts:
            return ServerFacts(models=("mine",), context_length=length, status=200)

        monkeypatch.setattr("appliance.doctor.server_facts.ask_server", answer)
        assert (f"reads {least:,} or more" in call(name).stderr) == is_said
