"""The command line: `appliance COMMAND`, a file for each command."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from appliance.commands.cache import cache
from appliance.commands.card import card
from appliance.commands.docs import docs
from appliance.commands.evaluate import evaluate
from appliance.commands.keys import keys
from appliance.commands.monitoring import monitoring
from appliance.commands.quantize import quantize
from appliance.commands.repack import repack
from appliance.commands.serve import serve
from appliance.commands.settings import settings
from appliance.commands.top import top
from appliance.config import warn_of_unknown_variables
from appliance.errors import ApplianceError
from appliance.version import __version__

app = typer.Typer(
    name="appliance",
    help="A quantization-first LLM serving appliance for the home.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Run the command line: an error the user can fix is one line and a non-zero exit."""
    try:
        app()
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
    """Warn of environment variables that are no settings."""
    if context.invoked_subcommand != "serve":  # which logs the same warning
        warn_of_unknown_variables()


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _as_paragraphs(docstring: str | None) -> str:
    paragraphs = (docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for command in (serve, quantize, repack, evaluate, card, top, monitoring, settings, docs):
    app.command(help=_as_paragraphs(command.__doc__))(command)
app.add_typer(cache, name="cache")
app.add_typer(keys, name="keys")
