"""All settings, a frozen struct for each section of the configuration file.

This is the one place to add a setting: its flag, environment variable, key in the configuration
file, help text and line of the reference come from its field here. Imports nothing heavy.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from appliance.api_keys import check_keys
from appliance.config.setting import Group, Setting, Unit, check_all
from appliance.config.top_section import TopConfig
from appliance.errors import ConfigError

MIB, GIB = 2**20, 2**30
MOST_BYTES = 2**50


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process needs to know.

    Raises:
        ConfigError: a value is out of bounds, on construction.
    """

    model: Annotated[
        str,
        Setting(
            "Folder, .gguf file or hub id, as MODEL.",
            Group.MODEL,
            default_is="the packaged model",
        ),
    ] = ""
    device: Annotated[
        str,
        Setting(
            "What computes: auto, cpu or cuda; auto is the GPU where there is one.",
            Group.COMPUTE,
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Setting(
            "Type of activations: auto, bfloat16, float16 or float32.",
            Group.COMPUTE,
            choices=("auto", "bfloat16", "float16", "float32"),
        ),
    ] = "auto"
    kernels: Annotated[
        str,
        Setting(
            "auto; torch, without the C library: slower, and a seeded answer may change with what"
            " else is in the batch; or reference: slow, to compare.",
            Group.COMPUTE,
            choices=("auto", "torch", "reference"),
        ),
    ] = "auto"
    cpu_isa: Annotated[
        str,
        Setting(
            "CPU instructions of the C library: auto, avx512, avxvnni, avx2 or scalar.",
            Group.COMPUTE,
            choices=("auto", "avx512", "avxvnni", "avx2", "scalar"),
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Setting(
            "Precision of the KV cache: auto, bf16, int8, fp8, k8v4, int4 and more.",
            Group.KV,
            choices=(
                *("auto", "fp32", "fp16", "bf16", "fp8", "int8", "k8v4"),
                *("int4", "int4-sealed", "int4-rotated"),
            ),
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Setting(
            "Longest context.",
            Group.STEPS,
            unit=Unit.TOKENS,
            low=16,
            high=2**24,
            default_is="the model's own",
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Setting("Sequences that run at once.", Group.STEPS, low=1, high=1024)
    ] = 32
    max_num_batched_tokens: Annotated[
        int,
        Setting("Most rows of one step.", Group.STEPS, unit=Unit.TOKENS, low=16, high=2**20),
    ] = 512
    block_size: Annotated[
        int | None,
        Setting(
            "Token slots of a KV block: 8, 16, 32 or 64.",
            Group.KV,
            choices=(8, 16, 32, 64),
            default_is="16, on a GPU 32",
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Setting(
            "Memory for the KV cache, such as 2GiB.",
            Group.KV,
            unit=Unit.BYTES,
            low=2**14,
            high=MOST_BYTES,
            default_is="planned from what is free",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Setting("Share of the GPU's memory to use.", Group.COMPUTE, low=0.05, high=1.0)
    ] = 0.90
    cuda_graphs: Annotated[
        str,
        Setting(
            "Replay decode steps as CUDA graphs: auto or off.",
            Group.COMPUTE,
            choices=("auto", "off"),
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Setting(
            "Sample as the model's makers recommend where a request says nothing: auto or off.",
            Group.REQUESTS,
            choices=("auto", "off"),
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Setting("CPU threads.", Group.COMPUTE, low=1, high=1024, default_is="the physical cores"),
    ] = None
    prefix_caching: Annotated[
        bool, Setting("Reuse the KV cache of beginnings that prompts share.", Group.KV)
    ] = True
    kv_disk: Annotated[
        str,
        Setting(
            "Folder that keeps KV cache over a restart, or off: only the beginning that a prompt"
            " shares with an earlier prompt and its answer, where that is 256 tokens or longer."
            " auto is the cache folder for a server, and off in a script.",
            Group.KV,
        ),
    ] = "auto"
    kv_disk_size: Annotated[
        int,
        Setting(
            "Most that this folder may take, of all models together.",
            Group.KV,
            unit=Unit.BYTES,
            low=MIB,
            high=MOST_BYTES,
        ),
    ] = 4 * GIB
    kv_host_memory: Annotated[
        int | None,
        Setting(
            "Host memory for KV blocks that had to make room; 0 computes them again.",
            Group.KV,
            unit=Unit.BYTES,
            low=0,
            high=MOST_BYTES,
            default_is="planned from what is free",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_all(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be less than "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a row per step"
            )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the API process needs to know.

    Raises:
        ConfigError: a value is out of bounds, on construction.
    """

    host: Annotated[
        str,
        Setting("Address to listen on; 0.0.0.0 lets other machines in, with a key.", Group.ADDRESS),
    ] = "127.0.0.1"
    port: Annotated[
        int, Setting("Port to listen on; 0 takes a free one.", Group.ADDRESS, low=0, high=65535)
    ] = 8080
    api_key: Annotated[
        str | None,
        Setting(
            "The API key without a name, which manages everything; not a flag, because other"
            " users can see those.",
            Group.ADDRESS,
            has_flag=False,
            is_key=True,
        ),
    ] = None
    api_keys: Annotated[
        dict[str, str],
        Setting(
            "More API keys, by the names of their holders.",
            Group.ADDRESS,
            has_flag=False,
        ),
    ] = msgspec.field(default_factory=dict)
    api_key_file: Annotated[
        str | None,
        Setting("File with API keys, a line NAME=KEY for each.", Group.ADDRESS),
    ] = None
    served_model_name: Annotated[
        str | None, Setting("Model id in the API.", Group.MODEL, default_is="the model's own")
    ] = None
    max_queue: Annotated[
        int, Setting("Requests that may wait.", Group.REQUESTS, low=0, high=10**6)
    ] = 64
    max_queue_tokens: Annotated[
        int,
        Setting(
            "Tokens of the prompts that may wait; one alone may be longer.",
            Group.REQUESTS,
            unit=Unit.TOKENS,
            low=1,
            high=10**9,
        ),
    ] = 2**20
    max_queue_seconds: Annotated[
        float,
        Setting(
            "How long a request may wait to be started.",
            Group.REQUESTS,
            unit=Unit.SECONDS,
            low=0.001,
            high=10 * 86400,
        ),
    ] = 600.0
    drain_timeout: Annotated[
        float,
        Setting(
            "How long answers may go on after the server was told to stop.",
            Group.REQUESTS,
            unit=Unit.SECONDS,
            low=0,
            high=86400,
        ),
    ] = 30.0
    share_prefixes_between_keys: Annotated[
        bool,
        Setting(
            "Let API keys reuse each other's cached prompt beginnings, though timing then tells"
            " them of each other.",
            Group.ADDRESS,
        ),
    ] = False
    max_body_bytes: Annotated[
        int,
        Setting("Largest body of a request.", Group.REQUESTS, unit=Unit.BYTES, low=1024, high=GIB),
    ] = 2 * MIB
    max_connections: Annotated[
        int,
        Setting("Connections of all clients together.", Group.ADDRESS, low=8, high=10**5),
    ] = 768
    allowed_origins: Annotated[
        str,
        Setting(
            "Origins of web pages and apps that may call, such as app://obsidian.md, with commas"
            " between; * allows all.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        Setting(
            "Names that a reverse proxy passes on, such as llm.example, with commas between; *"
            " allows all.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    tls_cert: Annotated[
        str | None,
        Setting(
            "File with a certificate and its chain, in PEM, to speak HTTPS; read again when it"
            " changes.",
            Group.ADDRESS,
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Setting("File with its private key.", Group.ADDRESS, default_is="the certificate's file"),
    ] = None
    root_path: Annotated[
        str,
        Setting(
            "Path under which a reverse proxy shows the server, as /llm.",
            Group.ADDRESS,
            default_is="the root",
        ),
    ] = ""
    trusted_proxies: Annotated[
        str,
        Setting(
            "Addresses of reverse proxies that are believed for whom they ask (X-Forwarded-For),"
            " as 127.0.0.1 or 10.0.0.0/8, with commas between.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    show_prompts: Annotated[
        bool,
        Setting("Let dashboards show what is asked; of several keys each sees its own.", Group.LOG),
    ] = False
    min_quality: Annotated[
        str | None,
        Setting(
            "Refuse a model whose quality card is worse, or warn: kld<=0.1 (or 0.1 for short),"
            " same-top>=90, ppl-ratio<=1.05, warn:kld<=0.05; with commas between.",
            Group.MODEL,
        ),
    ] = None
    log_level: Annotated[
        str,
        Setting(
            "Least level that is logged: debug, info, warning or error.",
            Group.LOG,
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        str,
        Setting(
            "Log lines as text, or as json, an object a line.",
            Group.LOG,
            choices=("text", "json"),
        ),
    ] = "text"
    access_log: Annotated[
        bool,
        Setting(
            "Log a line for each request: who, what, status and time, never what was asked.",
            Group.LOG,
        ),
    ] = False

    def __post_init__(self) -> None:
        check_all(self)
        check_keys(self.api_key, self.api_keys)
        if self.tls_key and not self.tls_cert:
            raise ConfigError("tls_key needs the certificate whose key it is: set tls_cert")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server needs to know."""

    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)


SECTIONS: dict[str, type[EngineConfig] | type[ServerConfig] | type[TopConfig]] = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "top": TopConfig,
}
