"""`appliance settings`: lists all settings."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def settings(
    toml: Annotated[
        bool, typer.Option("--toml", help="A configuration file with every setting, to start from.")
    ] = False,
) -> None:
    """List every setting with its flag, environment variable, default and bounds."""
    from appliance.config.reference import example_config, settings_reference

    if toml:
        typer.echo(example_config(), nl=False)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(settings_reference()))
    else:
        typer.echo(settings_reference(), nl=False)
