"""`appliance serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.examples import own_command, try_it
from appliance.commands.model_argument import Model
from appliance.commands.parting import parting
from appliance.commands.quality import Quality, quality_of
from appliance.commands.sizes import parse_size
from appliance.errors import ConfigError
from appliance.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.messages import EngineInfo
    from appliance.server.serve import Ready


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
    generation_config: Annotated[
        str | None,
        typer.Option(
            help="Sample as the model's makers recommend where a request says nothing: auto, off"
            " [auto]."
        ),
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
        typer.Option(help="auto, torch (no C library) or reference (slow, to compare) [auto]."),
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
            "generation_config": generation_config,
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

        def say_ready(ready: Ready) -> None:
            progress.close()
            text = banner(
                ready.url,
                ready.name,
                ready.info,
                quality,
                settings.server.keys(),
                sampling=ready.sampling,
                chats=ready.chats,
            )
            typer.echo(text, err=True)

        num_requests = run_server(
            settings,
            resolved,
            on_progress=progress,
            on_ready=say_ready,
            warnings=warnings,
            quality_card=quality.card,
        )
    typer.echo(parting(num_requests, settings.engine), err=True)


def banner(
    url: str,
    name: str,
    info: EngineInfo,
    quality: Quality | None = None,
    keys: Iterable[str] = (),
    *,
    sampling: SamplingDefaults = NOTHING_RECOMMENDED,
    chats: bool = True,
) -> str:
    """What a person needs to know once the server is ready; of keys their names."""
    names = ", ".join(keys)
    mib = 2**20
    tokens = info.num_blocks * info.block_size
    rows = [
        ("endpoint", f"{url}/v1"),
        ("model", f"{name}, {info.architecture}; weights {info.weight_format}; on {info.device}"),
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
        ("sampling", _sampling_in_words(sampling)),
        ("loaded in", f"{info.load_seconds:.1f} s"),
        *(("quality", line) for line in (quality.lines if quality is not None else ())),
        *(("note", note) for note in info.notes),
        *([("keys", f"{names}; what is below reads one from APPLIANCE_API_KEY")] if names else []),
        ("page", f"{url}/ with {'a chat' if chats else 'a text that the model continues'}"),
        ("dashboard", f"{own_command()} top --url {shlex.quote(url)}"),
        ("try it", try_it(url, name, sampling, chats=chats, keyed=bool(names))),
    ]
    return "\n".join(f"  {label:<10} {text}" for label, text in rows)


def _sampling_in_words(sampling: SamplingDefaults) -> str:
    if not sampling:
        return "temperature 1, no token left out; a request may say otherwise"
    return f"{sampling}, from {sampling.source}; a request may say otherwise"
