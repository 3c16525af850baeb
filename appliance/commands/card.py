"""`appliance card`: shows a quality card in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from appliance.quant.quality.card import Card


def card(
    model: Annotated[Path, typer.Argument(help="Folder or .gguf file that has a card.")],
    as_json: Annotated[bool, typer.Option("--json", help="The card as JSON.")] = False,
) -> None:
    """Show the quality card of a checkpoint."""
    from appliance.quant.quality.card import card_of, to_json

    if not model.exists():
        raise CheckpointError(f"there is nothing at {model}")
    found = card_of(model)
    if found is None:
        raise CheckpointError(
            f"{model} has no quality card; make one with: appliance evaluate {model} --against BASE"
        )
    if as_json:
        typer.echo(to_json(found), nl=False)
    else:
        show(found)


def show(found: Card) -> None:
    """Print a card: tables and bars on a terminal, Markdown elsewhere."""
    if sys.stdout.isatty():
        from appliance.commands.card_terminal import print_card

        print_card(found)
    else:
        from appliance.quant.quality.card_rows import to_markdown

        typer.echo(to_markdown(found), nl=False)
