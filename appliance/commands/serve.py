"""`appliance serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.commands.quality import Quality, quality_of
from appliance.commands.sizes import parse_size
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.messages import EngineInfo


def serve(
    model: Model = "",
    model_option: Annotated[str, typer.Option("--model", help="The same as MODEL.")] = "",
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8080].")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Model id in the API.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait [64].")] = None,
    max_queue_seconds: Annotated[
        float | None, typer.Option(help="Seconds that a request may wait to be started [600].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda [auto].")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Activations: auto, bfloat16, float16, float32 [auto].")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="KV cache: auto, bf16, int8, fp8, k8v4, int4, ... [auto].")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context in tokens [the model's own].")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences run at once [32].")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Rows a step [512].")] = None,
    block_size: Annotated[int | None, typer.Option(help="Token slots of a KV block.")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, such as 2GiB [planned].")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory to use [0.90].")
    ] = None,
    cuda_graphs: Annotated[
        str | None, typer.Option(help="Replay decode steps as CUDA graphs: auto, off [auto].")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads [physical cores].")] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option(help="Reuse the KV cache of shared prompt beginnings [on].")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="File with API keys, a line NAME=KEY for each.")
    ] = None,
    share_prefixes_between_keys: Annotated[
        bool | None,
        typer.Option(help="Let API keys reuse each other's cached prompt beginnings [off]."),
    ] = None,
    kv_disk: Annotated[
        str | None,
        typer.Option(
            help="Folder that keeps the KV cache of long prompts over a restart, or off"
            " [the cache folder]."
        ),
    ] = None,
    kv_disk_size: Annotated[
        str | None, typer.Option(help="Most that this folder may take, such as 4GiB [4GiB].")
    ] = None,
    kv_host_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for KV blocks that had to make room, or 0 [planned]."),
    ] = None,
    show_prompts: Annotated[
        bool | None, typer.Option(help="Let dashboards show what is asked [off].")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="auto; torch, without the C library: slower, and a seeded answer may change with"
            " what else is in the batch; or reference: slow, to compare [auto]."
        ),
    ] = None,
    cpu_isa: Annotated[
        str | None,
        typer.Option(help="CPU instructions: auto, avx512, avxvnni, avx2, scalar [auto]."),
    ] = None,
    min_quality: Annotated[
        str | None,
        typer.Option(
            help="Refuse a model whose quality card is worse, or warn: kld<=0.1 (or 0.1 for short),"
            " same-top>=90, ppl-ratio<=1.05, warn:kld<=0.05; with commas between."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings.")] = None,
    top: Annotated[
        bool, typer.Option("--top", help="Show the dashboard here; the server ends with it.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve a model behind an OpenAI-compatible endpoint.

    An API key comes from the environment variable APPLIANCE_API_KEY, several with names from
    --api-key-file.
    """
    from appliance import log
    from appliance.config import cache_dir, load_settings, with_kv_folder
    from appliance.hub import resolve_model
    from appliance.progress import ProgressLine
    from appliance.quant.quality.min_quality import parse_min_quality
    from appliance.server.serve import run_server

    if model and model_option and model != model_option:
        raise ConfigError(f"two models were given, {model!r} and {model_option!r}; name one")
    warnings = log.configure(logging.DEBUG if verbose else logging.INFO)
    settings = load_settings(
        {
            "model": model or model_option or None,
            "host": host,
            "port": port,
            "served_model_name": served_model_name,
            "max_queue": max_queue,
            "max_queue_seconds": max_queue_seconds,
            "device": device,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "kv_cache_memory": None if kv_cache_memory is None else parse_size(kv_cache_memory),
            "gpu_memory_utilization": gpu_memory_utilization,
            "cuda_graphs": cuda_graphs,
            "threads": threads,
            "prefix_caching": prefix_caching,
            "api_key_file": api_key_file,
            "share_prefixes_between_keys": share_prefixes_between_keys,
            "kv_disk": kv_disk,
            "kv_disk_size": None if kv_disk_size is None else parse_size(kv_disk_size),
            "kv_host_memory": None if kv_host_memory is None else parse_size(kv_host_memory),
            "show_prompts": show_prompts,
            "kernels": kernels,
            "cpu_isa": cpu_isa,
            "min_quality": min_quality,
        },
        config,
    )
    settings = with_kv_folder(settings)
    conditions = None
    if settings.server.min_quality is not None:
        conditions = parse_min_quality(settings.server.min_quality)
    if top:
        from appliance.commands.serve_top import serve_with_dashboard

        arguments = [word for word in sys.argv[1:] if word != "--top"]
        raise typer.Exit(serve_with_dashboard(settings.server, arguments))
    with ProgressLine() as progress:
        resolved = resolve_model(settings.engine.model, cache_dir=cache_dir(), progress=progress)
        quality = quality_of(resolved.path, conditions)

        def say_ready(url: str, name: str, info: EngineInfo) -> None:
            progress.close()
            typer.echo(banner(url, name, info, quality, settings.server.keys()), err=True)

        run_server(
            settings,
            resolved,
            on_progress=progress,
            on_ready=say_ready,
            warnings=warnings,
            quality_card=quality.card,
        )


def banner(
    url: str,
    name: str,
    info: EngineInfo,
    quality: Quality | None = None,
    keys: Iterable[str] = (),
) -> str:
    """What a person needs to know once the server is ready; of keys their names."""
    names = ", ".join(keys)
    bearer = ' -H "Authorization: Bearer $APPLIANCE_API_KEY"' if names else ""
    mib = 2**20
    tokens = info.num_blocks * info.block_size
    rows = [
        ("endpoint", f"{url}/v1"),
        ("model", f"{name}, {info.architecture}, {info.weight_format}, on {info.device}"),
        (
            "memory",
            f"weights {info.weight_bytes / mib:,.0f} MiB"
            f" + KV cache up to {info.kv_bytes / mib:,.0f} MiB"
            f" + workspace {info.workspace_bytes / mib:,.0f} MiB"
            f" of {info.memory_bytes / mib:,.0f} MiB",
        ),
        *(
            [("swap", f"up to {info.kv_host_bytes / mib:,.0f} MiB of host memory for KV blocks")]
            if info.kv_host_bytes
            else []
        ),
        (
            "KV cache",
            f"{info.kv_format}, {info.num_blocks:,} blocks of {info.block_size}"
            f" = {tokens:,} tokens; context {info.context_length:,}",
        ),
        ("loaded in", f"{info.load_seconds:.1f} s"),
        *(("quality", line) for line in (quality.lines if quality is not None else ())),
        *(("note", note) for note in info.notes),
        *([("keys", names)] if names else []),
        ("page", f"{url}/ with a chat"),
        ("dashboard", f"{'APPLIANCE_API_KEY=... ' if names else ''}appliance top --url {url}"),
        (
            "try it",
            f"curl {url}/v1/chat/completions{bearer} -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{name}", "temperature": 0.2, "max_tokens": 200, '
            f'"messages": [{{"role": "user", "content": "Hello!"}}]}}\'',
        ),
    ]
    return "\n".join(f"  {label:<10} {text}" for label, text in rows)
