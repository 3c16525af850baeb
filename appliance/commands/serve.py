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
from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import (
    EngineConfig,
    ServerConfig,
    cache_dir,
    known_keys,
    load_settings,
    network_url,
    warn_of_unknown_variables,
    with_kv_folder,
)
from appliance.errors import ConfigError
from appliance.runtime import resident_bytes
from appliance.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.messages import EngineInfo
    from appliance.server.serve import Ready

logger = logging.getLogger(__name__)


@with_setting_flags(EngineConfig, ServerConfig)
def serve(
    flags: Flags,
    model: Model = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with these settings.", show_default=False)
    ] = None,
    top: Annotated[
        bool, typer.Option("--top", help="Show the dashboard here; the server ends with it.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="The same as --log-level debug.")
    ] = False,
) -> None:
    """Serve a model behind an OpenAI-compatible endpoint.

    An API key comes from the environment variable APPLIANCE_API_KEY, several with names from
    --api-key-file. Every setting below can also stand in the environment (APPLIANCE_PORT=9000) or
    in ~/.config/appliance/config.toml; `appliance settings` lists them.
    """
    from appliance import log
    from appliance.hub import resolve_model
    from appliance.progress import ProgressLine
    from appliance.quant.quality.min_quality import parse_min_quality
    from appliance.server.serve import run_server

    flags = dict(flags)
    if model and flags["model"] and model != flags["model"]:
        raise ConfigError(f"two models were given, {model!r} and {flags['model']!r}; name one")
    flags["model"] = model or flags["model"]
    if verbose:
        flags["log_level"] = flags["log_level"] or "debug"
    settings = with_kv_folder(load_settings(flags, config))
    server = settings.server
    conditions = None if server.min_quality is None else parse_min_quality(server.min_quality)
    if top:
        from appliance.commands.serve_top import serve_with_dashboard

        arguments = [word for word in sys.argv[1:] if word != "--top"]
        raise typer.Exit(serve_with_dashboard(server, arguments))
    warnings = log.configure(server.log_level, server.log_format)
    warn_of_unknown_variables()
    say = logger.info if server.log_format == "json" else None
    with ProgressLine(say) as progress:
        resolved = resolve_model(settings.engine.model, cache_dir=cache_dir(), progress=progress)
        quality = quality_of(resolved.path, conditions)

        def say_ready(ready: Ready) -> None:
            progress.close()
            text = banner(
                ready.url,
                ready.name,
                ready.info,
                quality,
                known_keys(server),
                sampling=ready.sampling,
                chats=ready.chats,
                network=network_url(
                    server.host,
                    int(ready.url.rpartition(":")[2]),
                    tls=server.tls_cert is not None,
                ),
            )
            if say is None:
                typer.echo(text, err=True)
            else:
                say(text)

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
    network: str | None = None,
) -> str:
    """What a person needs to know once the server is ready; of keys their names.

    The URL is one that this machine can open, `network` the one for others.
    """
    names = ", ".join(keys)
    tokens = info.num_blocks * info.block_size
    rows = [
        ("endpoint", f"{url}/v1"),
        *([("network", f"{network}/v1 from other machines")] if network else []),
        ("model", f"{name}, {info.architecture}; weights {info.weight_format}; on {info.device}"),
        *_memory_rows(info),
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


def _memory_rows(info: EngineInfo) -> list[tuple[str, str]]:
    """What the engine takes when its KV cache is full, and what else of memory is taken."""
    parts = {"weights": info.weight_bytes, "KV cache": info.kv_bytes}
    parts |= {"workspace": info.workspace_bytes, "Python and PyTorch": info.process_bytes}
    mib = 2**20
    listed = " + ".join(f"{name} {size / mib:,.0f}" for name, size in parts.items() if size)
    rows = [
        (
            "memory",
            f"{sum(parts.values()) / mib:,.0f} MiB once the KV cache is full: {listed};"
            f" {info.memory_bytes / mib:,.0f} may be used. This server takes"
            f" {resident_bytes() / mib:,.0f} beside it",
        )
    ]
    if info.kv_host_bytes:
        size = f"{info.kv_host_bytes / mib:,.0f} MiB of host memory for KV blocks"
        rows.append(("swap", f"up to {size} that have to make room, beside all that"))
    return rows
