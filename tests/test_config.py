from __future__ import annotations

from pathlib import Path

import pytest

from appliance.config import EngineConfig, ServerConfig, load_settings
from appliance.errors import ConfigError
from appliance.kernels.kv_cache import KVFormat


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, "[server]\nport = 1\nmax_queue = 2\nhost = '127.0.0.2'\n")
    monkeypatch.setenv("APPLIANCE_MAX_QUEUE", "3")
    monkeypatch.setenv("APPLIANCE_PORT", "4")
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", "/somewhere")
    settings = load_settings({"port": 5, "device": None}, path)
    server = settings.server
    assert (server.port, server.max_queue, server.host) == (5, 3, "127.0.0.2")
    assert settings.engine == EngineConfig()


def test_the_kernels_are_chosen_by_file_environment_and_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, "[engine]\nkernels = 'torch'\ncpu_isa = 'scalar'\n")
    assert (EngineConfig().kernels, EngineConfig().cpu_isa) == ("auto", "auto")
    assert load_settings({}, path).engine == EngineConfig(kernels="torch", cpu_isa="scalar")
    monkeypatch.setenv("APPLIANCE_CPU_ISA", "avx2")
    assert load_settings({}, path).engine.cpu_isa == "avx2"
    engine = load_settings({"cpu_isa": "avxvnni", "kernels": "reference"}, path).engine
    assert engine == EngineConfig(cpu_isa="avxvnni", kernels="reference")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", "did you mean 'port'"),
        ("[serve]\nport = 1", "did you mean 'server'"),
        ("[engine]\nmax_model_length = 1", "did you mean 'max_model_len'"),
        ("port = 1", "unknown section"),
        ("[server]\nport = 'high'", "wrong type"),
        ("[server]\nport = 70000", "between 0 and 65535"),
        ("[engine]\ndevice = 'gpu'", "one of auto, cpu, cuda"),
        ("[engine]\nkernels = 'c'", "one of auto, torch, reference"),
        ("[engine]\ncpu_isa = 'sse2'", "one of auto, avx512, avxvnni, avx2, scalar"),
        ("[engine]\ncpu_isas = 'avx2'", "did you mean 'cpu_isa'"),
        ("[engine]\nmax_num_seqs = 64\nmax_num_batched_tokens = 32", "must not be less than"),
        ("[server", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load_settings({}, file_with(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_misspelt_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_MAX_QUEU", "3")
    with pytest.raises(ConfigError, match="did you mean 'max_queue'"):
        load_settings({})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_settings({}, tmp_path / "absent.toml")


def test_sections_do_not_share_names() -> None:
    assert not set(EngineConfig.__struct_fields__) & set(ServerConfig.__struct_fields__)


@pytest.mark.parametrize("kv_format", list(KVFormat), ids=lambda kv_format: kv_format.value)
def test_every_format_of_the_kv_cache_can_be_asked_for(kv_format: KVFormat) -> None:
    assert EngineConfig(kv_cache_dtype=kv_format.value).kv_cache_dtype == kv_format.value
