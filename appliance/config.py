"""Settings, read once at the edge from flags, environment and TOML into frozen structs.

The only module that reads environment variables. Imports nothing heavy.
"""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process needs to know."""

    model: str = ""  # folder, .gguf file or hub id; empty means the default model
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, bfloat16, float16, float32: type of activations
    kernels: str = "auto"  # auto, reference
    kv_cache_dtype: str = "auto"  # auto, or a KVFormat value
    max_model_len: int | None = None  # tokens; None means the model's own context, if it fits
    max_num_seqs: int = 32  # sequences that run at once
    max_num_batched_tokens: int = 512  # rows of one step
    block_size: int | None = None  # token slots; None means 16 on CPU, 32 on CUDA
    kv_cache_memory: int | None = None  # bytes; None plans from what is free
    gpu_memory_utilization: float = 0.90
    threads: int | None = None  # CPU threads; None means physical cores
    prefix_caching: bool = True


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the API process needs to know."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    served_model_name: str | None = None
    max_queue: int = 64  # requests that may wait
    max_body_bytes: int = 2 * 1024 * 1024
