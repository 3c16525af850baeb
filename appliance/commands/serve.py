"""`appliance serve`: serves a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from appliance import stages
from appliance.commands.model_argument import Model
from appliance.commands.parting import parting
from appliance.commands.quality import quality_of
from appliance.commands.serve_auto import with_best_fit
from appliance.commands.serve_banner import banner
from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import (
    EngineConfig,
    ServerConfig,
    known_keys,
    load_settings,
    network_url,
    service_socket,
    warn_of_unknown_variables,
    with_kv_folder,
)
from appliance.errors import ApplianceError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.config import ModelConfig, Settings
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.log import RecentWarnings
    from appliance.quant.quality.min_quality import Condition
    from appliance.server.api_server import RunningServer

logger = logging.getLogger(__name__)


@with_setting_flags(EngineConfig, ServerConfig)
def serve(
    flags: Flags,
    context: typer.Context,
    model: Model = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with these settings.", show_default=False)
    ] = None,
    top: Annotated[
        bool, typer.Option("--top", help="Show the dashboard here; the server ends with it.")
    ] = False,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Take the KV precision and context that `fit` ranks first."),
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
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.quant.quality.min_quality import parse_min_quality

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
    with context.obj or LaunchedProcess() as launched:  # it imports in parallel with this process
        num_requests = _run(settings, conditions, warnings, launched, auto=auto)
    typer.echo(parting(num_requests, settings.engine), err=True)


def _run(
    settings: Settings,
    conditions: tuple[Condition, ...] | None,
    warnings: RecentWarnings,
    launched: LaunchedProcess,
    *,
    auto: bool,
) -> int:
    """Find the model and serve it; return the number of finished requests."""
    from appliance.found_model import find_model_of
    from appliance.progress import ProgressLine
    from appliance.server.serve import ModelToServe, run_server
    from appliance.service.notice import ServiceNotice

    server = settings.server
    say = logger.info if server.log_format == "json" else None
    notice = ServiceNotice(service_socket())
    with ProgressLine(say) as progress:

        def show_progress(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            notice.progress(stage, done, total)

        models, found, qualities = [], [], {}
        for model in settings.served:
            with _about(model) if settings.models else contextlib.nullcontext():
                resolved, engine = find_model_of(model.engine, show_progress)
                if auto:
                    engine, why = with_best_fit(engine, resolved.path)
                    logger.info("auto: %s", why)
                quality = quality_of(resolved.path, conditions)
            models.append(msgspec.structs.replace(model, engine=engine))
            found.append(ModelToServe(resolved, quality.card))
            qualities[model.name or server.served_model_name or resolved.name] = quality
        settings = msgspec.structs.replace(settings, models=tuple(models))

        def say_ready(ready: RunningServer) -> None:
            progress.close()
            quality = qualities[ready.name]
            text = banner(
                ready.url,
                ready.name,
                ready.info,
                quality,
                known_keys(server),
                sampling=ready.sampling,
                chats=ready.chats,
                others=ready.others,
                replicas=ready.replicas,
                network=network_url(
                    server.host,
                    int(ready.url.rpartition(":")[2]),
                    tls=server.tls_cert is not None,
                ),
                started_in=_started_in(launched, ready.info),
            )
            if say is None:
                typer.echo(text, err=True)
            else:
                say(text)

        return run_server(
            settings,
            found,
            on_progress=show_progress,
            on_ready=say_ready,
            launched=launched,
            warnings=warnings,
            notice=notice,
        )


@contextlib.contextmanager
def _about(model: ModelConfig) -> Iterator[None]:
    """Add the configuration table's name to errors."""
    try:
        yield
    except ApplianceError as error:
        if model.name is not None and f"[models.{model.name}]" not in str(error):
            error.args = (f"[models.{model.name}]: {error}", *error.args[1:])
        raise


def _started_in(launched: LaunchedProcess, info: EngineInfo) -> str:
    loaded = (("command", launched.when), *info.stages, ("server", time.monotonic()))
    return stages.in_words(stages.process_start(), loaded)
