"""The command line: `appliance COMMAND`, a file for each command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, NoReturn

import typer

from appliance.commands.lazy import LazyGroup
from appliance.errors import ApplianceError
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.process.launch import LaunchedProcess


class Commands(LazyGroup):
    """Every command with its line in --help, at most 57 characters."""

    lines: ClassVar[Mapping[str, str]] = {
        "serve": "Serve a model behind an OpenAI-compatible endpoint.",
        "fit": "Rank the ways to serve a model on this machine.",
        "models": "Fetch, list, check and remove models.",
        "chat": "Talk with a server's model, or with one that runs here.",
        "connect": "Print the set-up of a client of the server.",
        "top": "Watch a running server: blocks, requests, throughput.",
        "quantize": "Quantize a model's weights into a folder.",
        "repack": "Store a quantized model in another format.",
        "evaluate": "Measure a checkpoint and write its quality card.",
        "card": "Show the quality card of a checkpoint.",
        "doctor": "Check machine, settings, model files and server.",
        "bench": "Measure speed and print a report to post.",
        "cluster": "Serve a model on several machines, through Ray Serve.",
        "install-service": "Print or write the systemd unit of the server.",
        "settings": "List every setting, its default and bounds.",
        "config": "Show the settings in effect.",
        "lora": "List and check LoRA adapters.",
        "keys": "List API keys, or make a new one.",
        "cache": "List or remove KV cache kept on the disk.",
        "monitoring": "Print a Grafana dashboard, alerts or scrape settings.",
        "docs": "Read the documentation; it needs no network.",
    }


app = typer.Typer(
    name="appliance",
    cls=Commands,
    rich_markup_mode=None,  # importing rich takes longer than the rest of --help
    help="A quantization-first LLM serving appliance for the home.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(launched: LaunchedProcess | None = None) -> NoReturn:
    """Run the command line; a user's error prints one line and exits non-zero.

    Args:
        launched: an engine process already started for `serve`.
    """
    try:
        app(obj=launched)
    except ApplianceError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def before_any_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Warn of environment variables that look like settings but are none."""
    # Those two warn themselves.
    if context.invoked_subcommand not in ("serve", "doctor"):
        from appliance.config import warn_of_unknown_variables

        warn_of_unknown_variables()


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
