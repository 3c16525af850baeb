from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.own_config import WriteConfig

from appliance.config import ServerConfig
from appliance.doctor.configuration import check_private_files, check_settings, check_variables
from appliance.doctor.examination import scope_of
from appliance.doctor.finding import Check, Finding, Grade, Scope

Look = Callable[[Check, Scope], dict[str, Finding]]
KEY = "0123456789abcdef"


def test_each_setting_that_is_not_the_default_has_its_origin(
    look: Look, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "all at their defaults" in look(check_settings, Scope())["settings"].found
    path = write_config(f"[server]\nport = 9000\nhost = '127.0.0.1'\napi_key = '{KEY}'\n")
    monkeypatch.setenv("APPLIANCE_THREADS", "3")
    found = look(check_settings, scope_of())["settings"]
    assert found.grade is Grade.OK
    assert found.found == (
        f"{path}; [server] port = 9000 by the file; [server] api_key = (set) by the file; "
        "[engine] threads = 3 by APPLIANCE_THREADS"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1\n", "unknown key 'prot' in [server]; did you mean 'port'?"),
        ("[sever]\nport = 1\n", "unknown section [sever]"),
        ("[server]\nport = 'high'\n", "must be a whole number; got 'high'"),
        ("[server\n", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_failure(
    look: Look, write_config: WriteConfig, text: str, words: str
) -> None:
    write_config(text)
    found = look(check_settings, scope_of())["settings"]
    assert found.grade is Grade.FAIL
    assert words in found.found
    assert "appliance settings" in found.fix


def test_a_file_that_is_named_and_missing_is_a_failure(look: Look, tmp_path: Path) -> None:
    found = look(check_settings, scope_of(tmp_path / "none.toml"))["settings"]
    assert (found.grade, "no configuration file" in found.found) == (Grade.FAIL, True)


def test_an_unknown_variable_is_a_warning(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(check_variables, Scope())["variables"].grade is Grade.OK
    monkeypatch.setenv("APPLIANCE_PROT", "1")
    found = look(check_variables, Scope())["variables"]
    assert (found.grade, "APPLIANCE_PORT" in found.found) == (Grade.WARN, True)


def test_who_may_read_keys_and_change_settings(
    look: Look, write_config: WriteConfig, tmp_path: Path
) -> None:
    keys, tls = tmp_path / "keys", tmp_path / "cert.pem"
    keys.write_text(f"anna={KEY}\n")
    keys.chmod(0o600)
    tls.touch(0o644)
    config = write_config("")
    scope = Scope(server=ServerConfig(api_key_file=str(keys), tls_cert=str(tls)))
    found = look(check_private_files, scope)
    assert "1 key, some in" in found["API keys"].found
    assert found["configuration file"].grade is Grade.OK
    assert (found["TLS key"].grade, found["TLS key"].fix) == (Grade.WARN, f"chmod 600 {tls}")
    keys.chmod(0o644)
    config.chmod(0o666)
    tls.unlink()
    found = look(check_private_files, scope)
    assert found["API keys"].grade is Grade.FAIL
    assert f"chmod 600 {keys}" in found["API keys"].found
    assert KEY not in str(found)
    assert found["configuration file"].grade is Grade.WARN
    assert found["TLS key"].grade is Grade.FAIL
