"""The server that `appliance top` watches, and its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.tui.run import TopOptions

KEY = "0123456789abcdef"
Watched = tuple[str, str | None, TopOptions]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Watched]:
    """The arguments with which the dashboard was started."""
    seen: list[Watched] = []

    def run(url: str, key: str | None, options: TopOptions) -> int:
        seen.append((url, key, options))
        return 0

    monkeypatch.setattr("appliance.tui.run.run_dashboard", run)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return seen


def call(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["top", *arguments])
    assert result.exit_code == 0, result.exception or result.output


def test_the_server_of_the_same_settings(
    watched: list[Watched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call()
    file = tmp_path / "appliance" / "config.toml"
    file.parent.mkdir()
    file.write_text(f"[server]\nport = 9000\napi_key = '{KEY}'\n[top]\ntheme = 'black'\n")
    file.chmod(0o600)
    call("--colors", "16")
    monkeypatch.setenv("APPLIANCE_PORT", "9001")
    call()
    other = file.rename(tmp_path / "other.toml")
    call("--config", str(other))
    assert [(url, key) for url, key, _ in watched] == [
        ("http://127.0.0.1:8080", None),
        ("http://127.0.0.1:9000", KEY),
        ("http://127.0.0.1:9001", KEY),
        ("http://127.0.0.1:9001", KEY),
    ]
    assert watched[1][2] == TopOptions(colors="16", theme="black")


def test_another_server_by_flag_or_variable(
    watched: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_URL", "http://gpu.lan:8000")
    monkeypatch.setenv("APPLIANCE_API_KEY", "short")  # of a server that is not ours
    call()
    call("--url", "nas.lan")
    assert [(url, key) for url, key, _ in watched] == [
        ("http://gpu.lan:8000", "short"),
        ("nas.lan", "short"),
    ]


def test_a_recording_needs_no_server(
    watched: list[Watched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPLIANCE_PORT", "high")
    call("--replay", str(tmp_path / "recording"))
    assert watched[0][:2] == ("", None)
    assert watched[0][2].replay == tmp_path / "recording"


def test_browsers_get_the_same_looks_and_configuration(
    watched: list[Watched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "appliance.commands.top.show_in_browsers", lambda *arguments: seen.append(arguments)
    )
    file = tmp_path / "named.toml"
    file.write_text(f"[server]\napi_key = '{KEY}'\n[top]\nweb_port = 9001\n")
    file.chmod(0o600)
    call("--web", "--config", str(file), "--theme", "light")
    (arguments,) = seen
    assert arguments[:4] == ("http://127.0.0.1:8080/", KEY, "127.0.0.1", 9001)
    assert arguments[4] == ["--colors", "auto", "--theme", "light", "--config", str(file)]
    assert not watched
