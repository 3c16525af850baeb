"""`appliance bench`: measures a server's speed and reports it."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.commands.asked_server import Config, Url, asked_server, require_models
from appliance.config import EngineConfig, ServerConfig, written_settings
from appliance.config.environment import CONFIG_VARIABLE
from appliance.config.setting import fields_of
from appliance.errors import ConfigError
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.bench.load import Endpoint
    from appliance.bench.own_server import ServerProcess

_ABOUT = {"weight_format": "weights", "kv_format": "KV cache", "device": "on", "backend": "by"}


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Start a server for this model and end it afterwards; without one, measure the"
            " server that runs."
        ),
    ] = None,
    streams: Annotated[str, typer.Option(help="How many ask at once, as 1,8.")] = "1,8",
    max_tokens: Annotated[int, typer.Option(min=2, max=4096, help="Length of an answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Bursts at each.")] = 3,
    url: Url = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure tokens per second and time to the first token, and print a report to post.

    It asks over HTTP as clients do. Nothing else should run on the machine meanwhile; the report
    says how busy it was. The engine's settings are the configured ones.
    """
    from appliance.bench.report import as_text

    levels = _levels(streams)
    if model is not None and url is not None:
        raise ConfigError("a model and --url were given; leave one out")
    with ExitStack() as stack:
        started = None
        if model is not None:
            server = stack.enter_context(_own_server(model, config, stack))
            typer.echo("starting a server", err=True)
            seconds = asyncio.run(server.healthy())
            started = {"ready_seconds": round(seconds, 2), "memory": server.memory()}
            url = f"http://{server.endpoint.host}:{server.endpoint.port}"
        result = asyncio.run(_measure(url, config, levels, max_tokens, repeats))
    if started is not None:
        result["started"] = started
    typer.echo(json.dumps(result, indent=2) if as_json else as_text(result))


async def _measure(
    url: str | None, config: Path | None, levels: tuple[int, ...], max_tokens: int, repeats: int
) -> dict[str, Any]:
    from appliance.bench.load import Endpoint, read_metrics
    from appliance.bench.report import machine_facts
    from appliance.bench.serving import LoadShape, measure
    from appliance.doctor.server_facts import ask_server
    from appliance.kernels.gpu.cards import driver_version

    server = asked_server(url, config)
    machine = machine_facts()
    facts = await ask_server(server)
    require_models(server, facts)
    key = server.headers.get("Authorization", "").removeprefix("Bearer ") or None
    endpoint = Endpoint.of_url(str(server.url), key, server.trusted())
    about = await read_metrics(endpoint, "appliance_model_info")
    labels = about[0].labels if about else {}
    shape = LoadShape(levels, repeats, max_tokens=max_tokens)
    before = await _accepted_tokens(endpoint)
    result = await measure(
        endpoint,
        facts.models[0],
        shape,
        facts.context_length,
        lambda words: typer.echo(f"measuring: {words}", err=True),
    )
    after = await _accepted_tokens(endpoint)
    drafted = None if before is None or after is None else int(after - before)
    return {
        "benchmark": "appliance bench",
        "version": facts.version or __version__,
        "machine": machine | {"gpu_driver": driver_version()},
        "model": {
            "id": facts.models[0],
            "about": {words: labels[name] for name, words in _ABOUT.items() if labels.get(name)},
        },
        "load": {"repeats": repeats, "max_tokens": max_tokens, "accepted_tokens": drafted},
        **result,
    }


async def _accepted_tokens(endpoint: Endpoint) -> float | None:
    """Return the tokens that came from drafts so far; None if the server does not say it."""
    from appliance.bench.load import read_metrics

    name = "vllm:spec_decode_num_accepted_tokens_total"
    samples = await read_metrics(endpoint, name)
    return sum(sample.value for sample in samples) if samples else None


def _levels(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= one <= 512 for one in found):
        raise ConfigError(f"--streams {text!r} is no list of numbers from 1 to 512, such as 1,8")
    return found


def _own_server(model: str, config: Path | None, stack: ExitStack) -> ServerProcess:
    """Start a server with the configured engine settings and default server settings."""
    from appliance.bench.own_server import ServerProcess

    engine, server = fields_of(EngineConfig), fields_of(ServerConfig)
    written = written_settings(EngineConfig, {"model": model, "kv_disk": "off"}, config)
    environment = dict.fromkeys((field.variable for field in server.values()), "")
    environment |= {
        engine[name].variable: engine[name].as_text(one.value) for name, one in written.items()
    }
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    empty = folder / "config.toml"
    empty.touch()
    environment[CONFIG_VARIABLE] = str(empty)
    return ServerProcess.ours(_free_port(), environment=environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
