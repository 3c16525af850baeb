from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.runs.own_config import WriteConfig

from appliance.config import (
    EngineConfig,
    ServerConfig,
    TopConfig,
    known_keys,
    load_section,
    load_settings,
    warn_of_unknown_variables,
)
from appliance.errors import ConfigError


def test_flags_beat_environment_beats_file_beats_defaults(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config("[server]\nport = 1\nmax_queue = 2\nhost = '127.0.0.2'\n")
    monkeypatch.setenv("APPLIANCE_MAX_QUEUE", "3")
    monkeypatch.setenv("APPLIANCE_PORT", "4")
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", "/somewhere")
    for named in (path, None):
        settings = load_settings({"port": 5, "device": None}, named)
        server = settings.server
        assert (server.port, server.max_queue, server.host) == (5, 3, "127.0.0.2")
        assert settings.engine == EngineConfig()


def test_the_kernels_are_chosen_by_file_environment_and_flag(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config("[engine]\nkernels = 'torch'\ncpu_isa = 'scalar'\n")
    assert (EngineConfig().kernels, EngineConfig().cpu_isa) == ("auto", "auto")
    assert load_settings({}, path).engine == EngineConfig(kernels="torch", cpu_isa="scalar")
    monkeypatch.setenv("APPLIANCE_CPU_ISA", "avx2")
    assert load_settings({}, path).engine.cpu_isa == "avx2"
    engine = load_settings({"cpu_isa": "avxvnni", "kernels": "reference"}, path).engine
    assert engine == EngineConfig(cpu_isa="avxvnni", kernels="reference")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_cache_memory", "512MiB", 2**29),
        ("kv_cache_memory", "2G", 2**31),
        ("kv_cache_memory", "1073741824", 2**30),
        ("kv_cache_memory", "auto", None),
        ("kv_disk_size", "8 GiB", 2**33),
        ("kv_host_memory", "0", 0),
        ("max_body_bytes", "4MiB", 2**22),
        ("max_queue_seconds", "90s", 90.0),
        ("max_queue_seconds", "10m", 600.0),
        ("max_queue_seconds", "2.5", 2.5),
        ("prefix_caching", "off", False),
        ("show_prompts", "yes", True),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("max_model_len", "auto", None),
        ("experts_on_cpu", "auto", None),
        ("experts_on_cpu", "12", 12),
        ("block_size", "32", 32),
        ("served_model_name", "", None),
    ],
)
def test_text_means_the_same_in_flags_environment_and_file(
    write_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    value: object,
) -> None:
    section = "engine" if name in EngineConfig.__struct_fields__ else "server"

    def read(flags: dict[str, object]) -> object:
        return getattr(getattr(load_settings(flags), section), name)

    assert read({name: text}) == value
    write_config(f"[{section}]\n{name} = '{text}'\n")
    assert read({}) == value
    write_config("")
    if text:  # an empty variable counts as absent: compose files set such
        monkeypatch.setenv(f"APPLIANCE_{name.upper()}", text)
        assert read({}) == value


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "KV_DISK", "API_KEY", "API_KEY_FILE", "CONFIG"):
        monkeypatch.setenv(f"APPLIANCE_{name}", "")
    settings = load_settings({})
    assert (settings.engine, settings.server) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", "unknown key 'prot' in [server]; did you mean 'port'?"),
        ("[serve]\nport = 1", "unknown section [serve]; did you mean 'server'?"),
        ("[engine]\nmax_model_length = 1", "did you mean 'max_model_len'?"),
        ("port = 1", "port belongs under [server]"),
        ("prot = 1", "unknown section [prot]"),
        ("server = 1", "server must be a section: [server]"),
        ("[server]\nport = 'high'", "port must be a whole number; got 'high'"),
        ("[server]\nport = 80.5", "port must be a whole number; got 80.5"),
        ("[server]\nport = true", "port must be a whole number; got True"),
        ("[server]\nport = [1]", "port must be a whole number; got [1]"),
        ("[server]\nport = 70000", "port must be between 0 and 65535; got 70000"),
        ("[server]\nhost = ''", "host must not be empty"),
        ("[server]\nshow_prompts = 'maybe'", "show_prompts must be on or off; got 'maybe'"),
        ("[server]\nmax_queue_seconds = '5 minutes'", "a duration such as 90s or 10m"),
        ("[server]\nmax_queue_seconds = 0", "must be between 0.001s and 10d; got 0s"),
        ("[server]\nmax_queue_seconds = nan", "must be between 0.001s and 10d"),
        ("[engine]\nkv_cache_memory = '512 pages'", "must be a size such as 512MiB or 2GiB; got"),
        ("[engine]\nkv_cache_memory = 1024", "must be between 16 KiB and 1024 TiB; got 1 KiB"),
        ("[engine]\nmax_model_len = 8", "must be between 16 and 16777216 tokens; got 8"),
        ("[engine]\nblock_size = 24", "block_size must be one of 8, 16, 32, 64; got 24"),
        ("[engine]\ndevice = 'gpu'", "device must be one of auto, cpu, cuda; got 'gpu'"),
        ("[engine]\nkernels = 'c'", "one of auto, torch, reference"),
        ("[engine]\ncpu_isa = 'sse2'", "auto, amx, avx512, avxvnni, avx2, i8mm, neon, scalar"),
        ("[engine]\ncpu_isas = 'avx2'", "did you mean 'cpu_isa'"),
        ("[engine]\nkv_disk = ''", "kv_disk must not be empty"),
        ("[engine]\nmax_num_seqs = 64\nmax_num_batched_tokens = 32", "(32) must not be less than"),
        (
            "[server]\napi_keys = ['anna-has-a-key']",
            "api_keys must be a table of the configuration file",
        ),
        (
            "[server.api_keys]\nanna = 12345678",
            "api_keys must be a table of the configuration file",
        ),
        ("[server", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_line_that_names_file_and_key(
    write_config: WriteConfig, text: str, expected: str
) -> None:
    path = write_config(text)
    with pytest.raises(ConfigError) as caught:
        load_settings({})
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_names_who_set_the_value(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^--port must be between 0 and 65535; got 70000$"):
        load_settings({"port": "70000"})
    monkeypatch.setenv("APPLIANCE_KV_CACHE_MEMORY", "lots")
    with pytest.raises(ConfigError, match=r"^APPLIANCE_KV_CACHE_MEMORY must be a size such as"):
        load_settings({})
    monkeypatch.delenv("APPLIANCE_KV_CACHE_MEMORY")
    path = write_config("[engine]\nmax_num_batched_tokens = 32\n")
    monkeypatch.setenv("APPLIANCE_MAX_NUM_SEQS", "64")
    with pytest.raises(ConfigError) as caught:
        load_settings({})
    assert str(caught.value).startswith(
        f"{path}: max_num_batched_tokens (32) must not be less than APPLIANCE_MAX_NUM_SEQS (64): "
    )


def test_a_section_is_loaded_whatever_the_values_of_others(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config("[server]\nport = 'high'\n[engine]\nthreads = 3\n[top]\ntheme = 'light'\n")
    monkeypatch.setenv("APPLIANCE_MAX_QUEUE", "many")
    assert load_section(EngineConfig, {}).threads == 3
    assert load_section(TopConfig, {"theme": "black"}).theme == "black"
    with pytest.raises(ConfigError):
        load_section(ServerConfig, {})


def test_a_variable_that_is_no_setting_is_told_with_the_nearest_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("APPLIANCE_MAX_QUEU", "3")
    monkeypatch.setenv("APPLIANCE_ZZZ", "secret")
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("APPLIANCE_URL", "here:1")
    with caplog.at_level(logging.WARNING, logger="appliance"):
        assert load_settings({}).server == ServerConfig()
        warn_of_unknown_variables()
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable APPLIANCE_MAX_QUEU is no setting and changes nothing; did you mean "
        "APPLIANCE_MAX_QUEUE?",
        "environment variable APPLIANCE_ZZZ is no setting and changes nothing",
    ]


def test_a_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent"):
        load_settings({}, absent)
    assert load_settings({}).server == ServerConfig()
    monkeypatch.setenv("APPLIANCE_CONFIG", str(absent))
    with pytest.raises(ConfigError, match=r"absent\.toml, which APPLIANCE_CONFIG names"):
        load_settings({})
    absent.write_text("[server]\nport = 7\n")
    assert load_settings({}).server.port == 7


def test_a_file_that_cannot_be_read_is_named(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config("")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=f"{path} cannot be read: Permission denied"):
        load_settings({})


@pytest.mark.parametrize("keys", ["api_key = 'x23456789'", "[server.api_keys]\nanna = 'x23456789'"])
def test_a_file_with_keys_is_for_its_owner_alone(write_config: WriteConfig, keys: str) -> None:
    path = write_config(f"[server]\n{keys}\n")
    assert [key.secret for key in known_keys(load_settings({}).server).values()] == ["x23456789"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"run: chmod 600 {path}$") as caught:
        load_settings({})
    assert "x23456789" not in str(caught.value)
    assert load_section(EngineConfig, {}) == EngineConfig(), "who needs no key is not held up"
    path.write_text("[server]\nport = 5\napi_key = ''\n")
    assert load_settings({}).server.port == 5
