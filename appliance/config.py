"""Settings, read once at the edge from flags, environment and TOML into frozen structs.

The only module that reads environment variables. Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import os
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from appliance.api_keys import check_keys, read_keys
from appliance.errors import ConfigError

ENV_PREFIX = "APPLIANCE_"
# Environment variables of ours that are not settings of the two structs.
OTHER_VARIABLES = {"CACHE_DIR", "CONFIG", "MODELS_DIR"}


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process needs to know.

    Raises:
        ConfigError: a value is out of range, on construction.
    """

    model: str = ""  # folder, .gguf file or hub id; empty means the default model
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, bfloat16, float16, float32: type of activations
    kernels: str = "auto"  # auto, torch, reference; auto is the C library on a CPU that has it
    cpu_isa: str = "auto"  # auto, avx512, avxvnni, avx2, scalar: what the C library computes with
    kv_cache_dtype: str = "auto"  # auto, fp32, fp16, bf16, fp8, int8, k8v4, int4[-sealed|-rotated]
    max_model_len: int | None = None  # tokens; None means the model's own context
    max_num_seqs: int = 32  # sequences that run at once
    max_num_batched_tokens: int = 512  # rows of one step
    block_size: int | None = None  # token slots; None means 16 on CPU, 32 on CUDA
    kv_cache_memory: int | None = None  # bytes; None plans from what is free
    gpu_memory_utilization: float = 0.90
    cuda_graphs: str = "auto"  # auto, off: replay decode steps as CUDA graphs
    threads: int | None = None  # CPU threads; None means physical cores
    prefix_caching: bool = True
    # Folder for KV blocks of long prompts, or off; auto is the cache folder for a server that
    # `appliance serve` starts, and off in a script.
    kv_disk: str = "auto"
    kv_disk_size: int = 4 << 30  # bytes, of all models
    kv_host_memory: int | None = None  # bytes, for KV blocks of preempted sequences and the like

    def __post_init__(self) -> None:
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _check_choice("cuda_graphs", self.cuda_graphs, ("auto", "off"))
        _check_choice("kernels", self.kernels, ("auto", "torch", "reference"))
        _check_choice("cpu_isa", self.cpu_isa, ("auto", "avx512", "avxvnni", "avx2", "scalar"))
        formats = (
            *("auto", "fp32", "fp16", "bf16", "fp8", "int8", "k8v4"),
            *("int4", "int4-sealed", "int4-rotated"),
        )
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, formats)
        _check_range("max_model_len", self.max_model_len, 16, 2**24)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 1024)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 16, 2**20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be less than "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a row per step"
            )
        if self.block_size is not None and self.block_size not in (8, 16, 32, 64):
            raise ConfigError(f"block_size must be 8, 16, 32 or 64, got {self.block_size}")
        _check_range("kv_cache_memory", self.kv_cache_memory, 2**14, 2**50)
        _check_range("kv_disk_size", self.kv_disk_size, 2**20, 2**50)
        _check_range("kv_host_memory", self.kv_host_memory, 0, 2**50)
        if not self.kv_disk:
            raise ConfigError("kv_disk must be a folder, off or auto; it is empty")
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 1.0)
        _check_range("threads", self.threads, 1, 1024)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the API process needs to know.

    Raises:
        ConfigError: a value is out of range, on construction.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None  # without a name; empty is none
    api_keys: dict[str, str] = msgspec.field(default_factory=dict)  # name to key
    api_key_file: str | None = None  # with more of them, a line NAME=KEY for each
    served_model_name: str | None = None
    max_queue: int = 64  # requests that may wait
    max_queue_seconds: float = 600.0  # that one may wait before it is started
    share_prefixes_between_keys: bool = False  # though timing then tells keys of each other
    max_body_bytes: int = 2 * 1024 * 1024
    max_connections: int = 768  # of all clients together
    # With commas between; * allows all. Origins are those of web pages and apps that may call, such
    # as app://obsidian.md; hosts are names that a reverse proxy passes on, such as llm.example.
    allowed_origins: str = ""
    allowed_hosts: str = ""
    show_prompts: bool = False  # to dashboards, of several keys each its own
    min_quality: str | None = None  # such as kld<=0.1 or warn:same-top>=90, see quant.min_quality

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        _check_range("max_queue", self.max_queue, 0, 10**6)
        _check_range("max_queue_seconds", self.max_queue_seconds, 0.001, 10**6)
        _check_range("max_body_bytes", self.max_body_bytes, 1024, 2**30)
        _check_range("max_connections", self.max_connections, 8, 10**5)
        check_keys(self.api_key, self.api_keys)

    def keys(self) -> dict[str, str]:
        """Name to key, of all that are let in; empty where no key is wanted."""
        return check_keys(self.api_key, self.api_keys)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sections, as a configuration file has them."""

    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)


_SECTIONS: dict[str, type[EngineConfig] | type[ServerConfig]] = {
    "engine": EngineConfig,
    "server": ServerConfig,
}


def cache_dir() -> Path:
    """Where downloads and derived files go."""
    if explicit := os.environ.get(ENV_PREFIX + "CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "appliance"


def kv_dir() -> Path:
    """Where a server keeps KV blocks of long prompts, unless it is told otherwise."""
    return cache_dir() / "kv"


def jobs_dir() -> Path:
    """Where long tasks of this user tell how far they are, see `appliance.jobs`."""
    return cache_dir() / "jobs"


def config_path() -> Path:
    """The configuration file that is read when none is named."""
    if explicit := os.environ.get(ENV_PREFIX + "CONFIG"):
        return Path(explicit)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "appliance" / "config.toml"


def api_key_from_environment() -> str | None:
    """The key with which a client of ours talks to a server."""
    return os.environ.get(ENV_PREFIX + "API_KEY") or None


def own_key(server: ServerConfig) -> tuple[str | None, dict[str, str]]:
    """A key that manages everything, for whoever starts the server to watch it.

    Returns:
        The key, None where none is wanted; and the environment in which the server lets it in:
        where there are several keys and all have names, it is one more.
    """
    keys, environment = server.keys(), dict(os.environ)
    if len(keys) < 2 or server.api_key:
        return next(iter(keys.values()), None), environment
    key = secrets.token_urlsafe(24)
    return key, environment | {ENV_PREFIX + "API_KEY": key}


def load_settings(flags: Mapping[str, Any], path: Path | None = None) -> Settings:
    """Merge flags over environment over file over defaults.

    Args:
        flags: setting name to value; None means the flag was not given.
        path: configuration file; None means the usual place, if a file is there.

    Raises:
        ConfigError: an unknown key (the nearest valid one is named), a wrong type or value.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for section, keys in _read_file(path).items():
        values[section].update(keys)
    for variable, text in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX)
        if variable != name and name not in OTHER_VARIABLES:
            key = name.lower()
            if key == "api_keys":
                raise ConfigError(
                    f"{variable} cannot hold keys by name; name a file with a line NAME=KEY for "
                    f"each in {ENV_PREFIX}API_KEY_FILE"
                )
            values[_section_of(key, f"environment variable {variable}")][key] = text
    for key, value in flags.items():
        if value is not None:
            values[_section_of(key, f"flag {key}")][key] = value
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"setting of the wrong type: {error}") from None
    return msgspec.structs.replace(settings, server=_with_key_file(settings.server))


def _with_key_file(server: ServerConfig) -> ServerConfig:
    if server.api_key_file is None:
        return server
    path = Path(server.api_key_file).expanduser()
    read = read_keys(path)
    if twice := sorted(read.keys() & server.keys().keys()):
        raise ConfigError(f"{path}: {twice[0]!r} has an API key already, in the settings")
    return msgspec.structs.replace(server, api_keys=server.api_keys | read)


def with_kv_folder(settings: Settings) -> Settings:
    """The settings of a server, whose prompts are kept in the usual folder unless it says else."""
    if settings.engine.kv_disk != "auto":
        return settings
    engine = msgspec.structs.replace(settings.engine, kv_disk=str(kv_dir()))
    return msgspec.structs.replace(settings, engine=engine)


def _read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    explicit = path is not None
    path = path or config_path()
    if not path.is_file():
        if explicit:
            raise ConfigError(f"there is no configuration file at {path}")
        return {}
    try:
        sections = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for section, keys in sections.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{_nearest(section, _SECTIONS)}")
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {section} must be a section: [{section}]")
        fields = _SECTIONS[section].__struct_fields__
        for key in keys:
            if key not in fields:
                raise ConfigError(
                    f"{path}: unknown key {key!r} in [{section}]{_nearest(key, fields)}"
                )
    return sections


def _section_of(key: str, source: str) -> str:
    for section, struct in _SECTIONS.items():
        if key in struct.__struct_fields__:
            return section
    every = [field for struct in _SECTIONS.values() for field in struct.__struct_fields__]
    raise ConfigError(f"{source} is not a setting{_nearest(key, every)}")


def _nearest(word: str, words: Any) -> str:
    found = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known: {', '.join(words)}"
