"""`appliance doctor` as a person calls it; tests/doctor tests its checks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appliance.cli import app
from appliance.doctor import examination
from appliance.doctor.finding import Finding, Grade, Scope

KEY, NAMED, FILED = "plain/key-0123", "named-key-4567", "filed-key-8901"
TOKEN, DIGEST = "hf_0123456789abcdef", "a" * 64


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--quick", *arguments])


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of a user named annabel, whose server is not running."""
    home = tmp_path / "annabel"
    home.mkdir()
    for name in ("APPLIANCE_API_KEY", "APPLIANCE_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "annabel")
    monkeypatch.setattr("socket.gethostname", lambda: "nas-of-annabel")
    monkeypatch.setenv("APPLIANCE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("APPLIANCE_PORT", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    return home


def write_config(home: Path, text: str) -> Path:
    path = home / ".config" / "appliance" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_status_is_that_of_the_worst(home: Path) -> None:
    result = call("--json")
    answer = json.loads(result.stdout)
    grades = {one["name"]: one["status"] for one in answer["findings"]}
    assert (result.exit_code, grades["settings"]) == (0, "ok"), answer
    assert "fail" not in grades.values()
    assert grades["server"] == "unknown"
    write_config(home, "[server]\nprot = 1\n")
    result = call()
    assert result.exit_code == 1
    assert "fail     settings" in result.stdout
    assert "fix: correct it" in result.stdout
    assert "1 fail" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("is_broken", [False, True])
def test_no_form_of_the_report_has_a_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    keys = home / "keys"
    keys.write_text(f"bob={FILED} requests=60\neve=sha256:{DIGEST}\n")
    keys.chmod(0o644 if is_broken else 0o600)
    wrong = f"port = '{KEY}'\nmodel = '{KEY}'" if is_broken else ""
    write_config(
        home,
        f"[server]\napi_key = '{KEY}'\napi_key_file = '{keys}'\nallowed_hosts = '192.168.1.77'\n"
        f"{wrong}\n[server.api_keys]\nannabel = '{NAMED}'\n",
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv(f"APPLIANCE_{FILED}", "1")  # a key in the wrong place

    def leaky(scope: Scope) -> Iterable[Finding]:
        yield Finding("leaky", Grade.OK, f"{KEY} {NAMED} {FILED} {TOKEN} Bearer xyz-123 {DIGEST}")
        yield Finding(
            "people", Grade.OK, f"{home}/x of annabel at nas-of-annabel /home/eve/y; 60 requests"
        )
        raise RuntimeError(f"http://bob:passw@host/ and sha256:{DIGEST}")

    monkeypatch.setattr(examination, "CHECKS", (*examination.CHECKS, leaky))
    for form in ((), ("--json",), ("--report",)):
        result = call(*form)
        assert "leaky" in result.stdout, result.exception
        for secret in (KEY, NAMED, FILED, TOKEN, "xyz-123", "passw", f"sha256:{DIGEST}"):
            assert secret not in result.stdout, (form, secret)
    for private in ("annabel", "192.168.1.77", "/home/eve", str(home)):
        assert private not in result.stdout
    assert "## Findings" in result.stdout
    assert "~/x of USER at HOST ~/y; 60 requests" in result.stdout


def test_a_check_that_fails_hinders_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scope: Scope) -> Iterable[Finding]:
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr(examination, "CHECKS", (broken, *examination.CHECKS[:1]))
    result = call()
    first, second, third = result.stdout.splitlines()[:3]
    assert "this check failed: ZeroDivisionError: no reason" in first
    assert "--report" in second
    assert "settings" in third
    assert result.exit_code == 0


def test_one_form_at_a_time(home: Path) -> None:
    assert "leave one out" in str(call("--json", "--report").exception)


def test_torch_is_not_loaded_without_need(home: Path) -> None:
    code = (
        "import sys; sys.argv = ['appliance', 'doctor', '--quick', '--json']\n"
        "from appliance.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'transformers', 'fastapi'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "set()", result.stdout
