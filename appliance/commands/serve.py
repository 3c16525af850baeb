"""`appliance serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.commands.quality import Quality, quality_of
from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import (
    EngineConfig,
    ServerConfig,
    cache_dir,
    load_settings,
    network_url,
    warn_of_unknown_variables,
    with_kv_folder,
)
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.messages import EngineInfo

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

        def say_ready(url: str, name: str, info: EngineInfo) -> None:
            progress.close()
            network = network_url(server.host, int(url.rpartition(":")[2]))
            text = banner(url, name, info, quality, server.keys(), network=network)
            if say is None:
                typer.echo(text, err=True)
            else:
                say(text)

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
    *,
    network: str | None = None,
) -> str:
    """What a person needs to know once the server is ready; of keys their names.

    The URL is one that this machine can open, `network` the one for others.
    """
    names = ", ".join(keys)
    bearer = ' -H "Authorization: Bearer $APPLIANCE_API_KEY"' if names else ""
    mib = 2**20
    tokens = info.num_blocks * info.block_size
    rows = [
        ("endpoint", f"{url}/v1"),
        *([("network", f"{network}/v1 from other machines")] if network else []),
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
