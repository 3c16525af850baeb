"""The command line: `appliance COMMAND`, a file for each command."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from appliance.commands.cache import cache
from appliance.commands.card import card
from appliance.commands.docs import docs
from appliance.commands.evaluate import evaluate
from appliance.commands.monitoring import monitoring
from appliance.commands.quantize import quantize
from appliance.commands.repack import repack
from appliance.commands.serve import serve
from appliance.commands.top import top
from appliance.errors import ApplianceError

app = typer.Typer(
    name="appliance",
    help="A quantization-first LLM serving appliance for the home.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Entry point: an error a person can fix is one line and a non-zero exit."""
    try:
        app()
    except ApplianceError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


@app.command()
def version() -> None:
    """Print the version."""
    from appliance.version import __version__

    typer.echo(__version__)


for command in (serve, quantize, repack, evaluate, card, top, monitoring, docs):
    app.command()(command)
app.add_typer(cache, name="cache")
