"""`appliance serve`: serves a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from appliance.commands.model_argument import Model
from appliance.commands.quality import Quality, quality_of
from appliance.commands.serve_banner import banner, parting
from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import (
    EngineConfig,
    ServerConfig,
    known_keys,
    load_settings,
    network_url,
    service_socket,
    warn_of_unknown_variables,
    with_cache_folders,
)
from appliance.config.setting import fields_of
from appliance.errors import ApplianceError, ConfigError, EngineError, MemoryPlanError
from appliance.progress import stages
from appliance.runtime import child_environment
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import ModelConfig, Settings
    from appliance.engine.nouns.messages import EngineInfo
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
    settings = with_cache_folders(load_settings(flags, config))
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
    from appliance.hub.found_model import find_model_of
    from appliance.hub.growth import ignore_progress
    from appliance.progress.progress import ProgressLine
    from appliance.server.api_server import none_can_be_had, run_server
    from appliance.server.models.model_state import MissingModel, ModelToServe
    from appliance.service.notice import ServiceNotice

    server = settings.server
    say = logger.info if server.log_format == "json" else None
    notice = ServiceNotice(service_socket())
    with ProgressLine(say) as progress:

        def show_progress(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            notice.progress(stage, done, total)

        found: list[ModelToServe | MissingModel] = []
        qualities: dict[str, Quality] = {}
        failures: list[ApplianceError] = []

        def find(
            model: ModelConfig, on_progress: Callable[[str, int, int], None] = ignore_progress
        ) -> ModelToServe:
            resolved, engine = find_model_of(model.engine, on_progress)
            if auto:
                engine, why = with_best_fit(engine, resolved.path)
                logger.info("auto: %s", why)
            quality = quality_of(resolved.path, conditions, prompt_int8=engine.prompt_int8)
            qualities[model.name or resolved.name] = quality
            engine = msgspec.structs.replace(engine, model=str(resolved.path))
            return ModelToServe(resolved, engine, quality.card)

        for model in settings.served:
            try:
                found.append(find(model, show_progress))
            except ApplianceError as error:
                if model.name is None or not settings.models:
                    raise
                missing = MissingModel(model.name, model.engine, str(error), partial(find, model))
                found.append(missing)
                error.args = (f"[models.{model.name}]: {error}", *error.args[1:])
                failures.append(error)
        if len(failures) == len(found):
            raise none_can_be_had(failures)
        for failure in failures:
            logger.warning("%s; its requests are refused until it can be had", failure)

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
                columns=shutil.get_terminal_size().columns if sys.stderr.isatty() else 0,
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


def _started_in(launched: LaunchedProcess, info: EngineInfo) -> str:
    loaded = (("command", launched.when), *info.stages, ("server", time.monotonic()))
    return stages.in_words(stages.process_start(), loaded)


def with_best_fit(engine: EngineConfig, model: Path) -> tuple[EngineConfig, str]:
    """Return settings with the top-ranked KV precision and context, and the reason.

    Keeps the user's settings, `--weight-bits` included. Plans in a separate process, because the
    plan loads PyTorch, which a server never does.

    Raises:
        MemoryPlanError: nothing fits; the message names the closest setting that does.
    """
    ranked = [
        one
        for one in _ranked(engine, model)
        if (one["weight_bits"], one["end_bits"]) == (engine.weight_bits, engine.end_bits)
        and one["weights"] not in ("int8", "int4")  # `quantize` would have to make them first
        and engine.kv_cache_dtype in ("auto", one["kv_cache_dtype"])
    ]
    best = next((one for one in ranked if one["fits"]), None)
    if best is None:
        raise MemoryPlanError(ranked[0]["refusal"] if ranked else "nothing fits; see appliance fit")
    chosen = msgspec.structs.replace(
        engine,
        kv_cache_dtype=best["kv_cache_dtype"],
        max_model_len=best["context_length"],
        mamba_cache_dtype=best["mamba_cache_dtype"],
    )
    total, budget = (as_size(best["bytes"][name]) for name in ("total", "budget"))
    states = "" if best["mamba_cache_dtype"] == "fp32" else f", states {best['mamba_cache_dtype']}"
    why = f"KV cache {best['kv_format']}{states}, context {best['context_length']:,}"
    why += f": {total} of {budget}"
    if best["refusal"]:
        why += f"; with a longer context {best['refusal']}"
    return chosen, why


def _ranked(engine: EngineConfig, model: Path) -> list[dict[str, Any]]:
    fields = fields_of(type(engine))
    values = ((fields[name], getattr(engine, name)) for name in fields)
    variables = {
        field.variable: field.as_text(value)
        for field, value in values
        if value not in (None, "", field.default)
    }
    context = [] if engine.max_model_len is None else ["--context", str(engine.max_model_len)]
    words = ["fit", str(model), "--json", "--no-speed", *context]
    finished = subprocess.run(
        [sys.executable, "-P", "-m", "appliance", *words],
        env=child_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines()
        raise EngineError(lines[-1].removeprefix("error: ") if lines else "appliance fit failed")
    found: list[dict[str, Any]] = json.loads(finished.stdout)["candidates"]
    return found
