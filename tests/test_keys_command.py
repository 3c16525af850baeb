from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.config import ServerConfig, known_keys
from appliance.config.api_keys import digest_of
from appliance.errors import ConfigError


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_new_key_is_shown_once_and_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "keys"
    file = ("--api-key-file", str(path))
    secret = call("new", "anna", "--tokens", "1000", "--priority", "-5", *file).strip()
    other = call("new", "tim", *file).strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    found = known_keys(ServerConfig(api_key_file=str(path)))
    assert found["anna"].digest == digest_of(secret)
    assert found["tim"].digest == digest_of(other)
    assert call("ls", *file).splitlines() == ["anna  tokens=1000 priority=-5", "tim"]


def test_a_file_that_a_person_wrote_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\ntim=key-of-tim")
    path.chmod(0o600)
    call("new", "anna", "--api-key-file", str(path))
    assert path.read_text().startswith("# ours\ntim=key-of-tim\nanna=sha256:")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tim"], "'tim' has a key already"),
        (["a b"], "a name that cannot be used"),
        (["eva", "--requests", "0"], "requests must be a whole number from 1"),
    ],
)
def test_what_a_server_would_refuse_is_not_written(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    path = tmp_path / "keys"
    path.write_text("tim=key-of-tim")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=expected):
        call("new", *arguments, "--api-key-file", str(path))
    assert path.read_text() == "tim=key-of-tim"


def test_without_a_file_it_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="name one with --api-key-file"):
        call("new", "anna")
    assert "no key is needed" in call("ls")
