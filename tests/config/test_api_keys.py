from __future__ import annotations

from pathlib import Path

import pytest

from appliance.config import ServerConfig, known_keys, load_settings, own_key
from appliance.config.api_keys import (
    ApiKey,
    KeyLimits,
    check_keys,
    digest_of,
    new_entry,
    read_keys,
    show_limits,
)
from appliance.errors import ConfigError

SECRET = "sk-9f1c-anna"
HASHED = f"sha256:{digest_of(SECRET).hex()}"


def file_with(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def secrets_of(keys: dict[str, ApiKey]) -> dict[str, str | None]:
    return {name: key.secret for name, key in keys.items()}


def test_a_file_has_a_name_and_a_key_on_each_line(tmp_path: Path) -> None:
    text = f"# the family\n\nanna={SECRET}\n home-assistant = abcd=efgh== \nbare-key-1234\n"
    assert read_keys(file_with(tmp_path, text)) == {
        "anna": SECRET,
        "home-assistant": "abcd=efgh==",
        "key": "bare-key-1234",
    }


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620])
def test_a_file_that_others_may_read_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, mode: int
) -> None:
    path = file_with(tmp_path, f"anna={SECRET}").rename(tmp_path / "the keys")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"run: chmod 600 '{path}'$") as caught:
        read_keys(path)
    assert SECRET not in str(caught.value)
    path.chmod(0o400)
    assert read_keys(path) == {"anna": SECRET}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"anna={SECRET}\nanna=another-key", "line 2: 'anna' has a key already"),
        (f"{SECRET}\n{SECRET}2", "line 2: 'key' has a key already"),
        ("anna=short", r"line 1: the key in NAME=KEY is too short: it has 5 of at least 8"),
        ("abcdefghijklmnop==", r"line 1: the key in NAME=KEY is too short: it has 1 of at least 8"),
        ("short", "line 1: .* openssl rand -hex 16$"),
        (f"anna=two-words {SECRET}", "line 1: .* followed by something else than requests, tokens"),
        (f"anna={SECRET} requests=1 requests=2", "followed by something else"),
        (f"anna={SECRET} requests=many", "requests must be a whole number from 1 to 1000000"),
        (f"anna={SECRET} tokens=0", "tokens must be a whole number from 1"),
        (f"anna={SECRET} parallel=1.5", "parallel must be a whole number from 1 to 10000"),
        (f"anna={SECRET} priority=-101", "priority must be a whole number from -100 to 100"),
        ("anna=sha256:abcdefgh", "must have 64 hexadecimal digits behind sha256:"),
        (f"an na={SECRET}", "a name that cannot be used"),
        (f"none={SECRET}", "not 'none'"),
        (f"={SECRET}", "a name that cannot be used"),
        ("# nothing\n", "no key in the API key file"),
        (f"änna={SECRET}", "not plain ASCII"),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_never_shown(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        read_keys(file_with(tmp_path, text))
    assert SECRET not in str(caught.value)
    assert "abcdefgh" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read: No such file"):
        read_keys(tmp_path / "absent")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_keys(tmp_path)


def test_keys_come_from_file_settings_and_environment_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", "key-of-mine")
    monkeypatch.setenv("APPLIANCE_API_KEY_FILE", str(file_with(tmp_path, f"anna={SECRET}")))
    config = tmp_path / "config.toml"
    config.write_text("[server.api_keys]\ncodex = 'key-of-codex'\n")
    config.chmod(0o600)
    keys = known_keys(load_settings({}, config).server)
    assert secrets_of(keys) == {"key": "key-of-mine", "codex": "key-of-codex", "anna": SECRET}


def test_the_environment_names_a_file_and_holds_no_named_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEYS", f"anna={SECRET}")
    with pytest.raises(ConfigError, match="in APPLIANCE_API_KEY_FILE") as caught:
        load_settings({})
    assert SECRET not in str(caught.value)


def test_without_any_key_none_is_wanted() -> None:
    assert known_keys(ServerConfig()) == known_keys(ServerConfig(api_key="")) == {}


@pytest.mark.parametrize(
    ("bare", "named", "expected"),
    [
        ("key-of-mine", {"key": SECRET}, "choose another"),
        ("short", {}, "too short: it has 5 of at least 8 characters; make one with: openssl"),
        (SECRET, {"anna": SECRET}, "'key' and 'anna' have the same API key"),
        (None, {"anna": SECRET, "tim": SECRET}, "'anna' and 'tim' have the same"),
        ("two-words-in one", {}, "followed by something else"),
        ("zwei-wörter", {}, "without spaces"),
        (None, {"anna": "short"}, "of 'anna' is too short"),
        (None, {"anna": SECRET, "tim": HASHED}, "'anna' and 'tim' have the same"),
        (None, {"an,na": SECRET}, "a name that cannot be used"),
    ],
)
def test_names_and_keys_that_cannot_be_told_apart_or_used_are_refused(
    bare: str | None, named: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        check_keys(bare, named)
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match=expected):
        ServerConfig(api_key=bare, api_keys=named)


def test_a_name_may_not_stand_in_file_and_settings_both(tmp_path: Path) -> None:
    path = file_with(tmp_path, f"anna={SECRET}")
    config = tmp_path / "config.toml"
    config.write_text("[server.api_keys]\nanna = 'another-key'\n")
    config.chmod(0o600)
    with pytest.raises(ConfigError, match="'anna' has an API key already"):
        load_settings({"api_key_file": str(path)}, config)


def test_who_starts_a_server_manages_it_whatever_keys_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"anna": SECRET, "codex": SECRET[::-1]}
    assert own_key(ServerConfig())[0] is None
    assert own_key(ServerConfig(api_key="bare-key"))[0] == "bare-key"
    assert own_key(ServerConfig(api_key="bare-key", api_keys=named))[0] == "bare-key"
    assert own_key(ServerConfig(api_keys={"anna": SECRET}))[0] == SECRET, "the only one"
    key, environment = own_key(ServerConfig(api_keys=named))
    assert key
    assert key not in named.values()
    monkeypatch.setattr("os.environ", environment)
    config = tmp_path / "config.toml"
    config.write_text(f"[server.api_keys]\nanna = '{SECRET}'\ncodex = '{SECRET[::-1]}'\n")
    config.chmod(0o600)
    assert secrets_of(known_keys(load_settings({}, config).server)) == {"key": key, **named}


def test_who_starts_a_server_that_knows_a_digest_only_has_a_key_of_its_own() -> None:
    key, environment = own_key(ServerConfig(api_keys={"anna": HASHED}))
    assert key
    assert environment["APPLIANCE_API_KEY"] == key


def test_a_digest_and_limits_are_read_and_written(tmp_path: Path) -> None:
    words = "requests=60 tokens=100000 parallel=4 priority=-5"
    path = file_with(tmp_path, f"anna={HASHED}  {words}\ntim=key-of-tim parallel=1\nan-key-of-all")
    keys = known_keys(ServerConfig(api_key_file=str(path)))
    assert keys["anna"] == ApiKey(digest_of(SECRET), KeyLimits(60, 100_000, 4, -5))
    assert keys["tim"].limits == KeyLimits(parallel=1)
    assert keys["key"].limits == KeyLimits()
    assert show_limits(keys["anna"].limits) == words
    assert show_limits(KeyLimits()) == ""
    assert SECRET not in repr(keys)


def test_a_new_key_is_known_by_its_entry() -> None:
    secret, entry = new_entry(KeyLimits(requests=60))
    key = ApiKey.parse(entry, "it")
    assert key.digest == digest_of(secret)
    assert key.limits == KeyLimits(requests=60)
    assert secret not in entry
    assert new_entry(KeyLimits())[0] != secret
