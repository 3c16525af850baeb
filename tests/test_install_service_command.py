"""`appliance install-service` as a person calls it; tests/service tests its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appliance.cli import app
from appliance.commands import install_service


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["install-service", *arguments])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the test's own instead of the system's and the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(install_service, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(install_service, "CONFIG", tmp_path / "etc" / "config.toml")
    return tmp_path


def test_without_write_nothing_is_written(folders: Path) -> None:
    result = call("--user")
    assert "Type=notify" in result.stdout
    assert "nothing was written" in result.stderr
    assert list(folders.iterdir()) == []


def test_a_user_unit_is_written_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "m.gguf").touch()
    monkeypatch.chdir(folders)
    assert "loginctl enable-linger" in call("--user", "--write", "m.gguf").stdout
    unit = folders / "user" / "systemd" / "user" / "appliance.service"
    start = f"ExecStart={sys.executable} -P -m appliance serve {folders}/m.gguf\n"
    assert start in unit.read_text()
    assert call("--user", "--write", "m.gguf").exit_code == 0  # the same command again
    assert "exists and differs" in str(call("--user", "--write", "org/other").exception)
    assert call("--user", "--write", "--force", "org/other").exit_code == 0
    assert "serve org/other\n" in unit.read_text()


def test_a_system_unit_comes_with_a_private_file_of_settings(folders: Path) -> None:
    result = call("--write", "--run-as", "llm")
    assert result.exit_code == 0, result.exception
    assert "User=llm" in (folders / "system" / "appliance.service").read_text()
    config = folders / "etc" / "config.toml"
    assert config.stat().st_mode & 0o777 == 0o600
    config.write_text("[server]\ndrain_timeout = 100\n")
    assert "TimeoutStopSec=115" in call("--run-as", "llm").stdout
    assert "config.toml\n[" not in call("--run-as", "llm").stdout  # it exists, and stays


def test_a_program_in_a_home_folder_cannot_run_for_an_account_without_one(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/anna/.venv/bin/python")
    error = str(call().exception)
    assert "in a home folder" in error
    assert "--user" in error


def test_a_folder_that_is_not_ours_is_one_line(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders / "file").touch()
    monkeypatch.setattr(install_service, "SYSTEM", folders / "file")
    assert "cannot be written: " in str(call("--write", "--run-as", "x").exception)
    assert "leave one out" in str(call("--user", "--run-as", "x").exception)
    assert "leave one out" in str(call("--docker", "d", "--user").exception)


def test_files_for_docker(folders: Path) -> None:
    assert call("--docker", str(folders / "box"), "--write").exit_code == 0
    names = {path.name for path in (folders / "box").iterdir()}
    assert names == {"Dockerfile", "compose.yaml", "compose.gpu.yaml"}
