"""Prints a quality card on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from appliance.quant.quality import card_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Card

BAR_WIDTH = 24
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def print_card(card: Card, console: Console | None = None) -> None:
    console = console or Console()
    title = Text(card.line())
    console.print(Panel(title, title=f"quality of {card.model.name}", title_align="left"))
    console.print(_pairs(card_rows.measures(card)))
    if card.kinds:
        rows = list(map(card_rows.kind_row, card.kinds))
        klds = [row.comparison.kld_mean.value for row in card.kinds]
        console.print(_numbers("by kind of text", card_rows.KINDS_HEADER, rows, klds))
    if rows := card_rows.alternatives(card):
        klds = [float(row[2]) for row in rows]
        console.print(_numbers("size against quality", card_rows.ALTERNATIVES_HEADER, rows, klds))
    if card.kv:
        rows = [card_rows.kv_row(row) for row in card.kv]
        klds = [row.comparison.kld_mean.value for row in card.kv]
        console.print(_numbers("by KV cache", card_rows.KV_HEADER, rows, klds))
    if card.tasks:
        rows = list(map(card_rows.task_row, card.tasks))
        scores = [score.value for score in card.tasks]
        console.print(_numbers("tasks (lm-eval)", card_rows.TASKS_HEADER, rows, scores))
    if card.layers:
        console.print(_layers(card))
    console.print(_pairs(card_rows.facts(card)))
    for note in card_rows.notes(card):
        console.print(Text(f"note: {note}", style="yellow"))


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Draw a bar for a share of the width, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "\u2588" * full + (_EIGHTHS[rest] if rest else "")


def _pairs(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _numbers(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], values: Sequence[float]
) -> Group:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    table.add_column(min_width=BAR_WIDTH)
    highest = max(values, default=0.0) or 1.0
    for row, value in zip(rows, values, strict=True):
        table.add_row(*map(Text, row), Text(bar(value / highest), style="blue"))
    return Group(Text(f"\n{title}", style="bold"), table)


def _layers(card: Card) -> Group:
    highest = max(error.stream for error in card.layers) or 1.0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layer", "stream", "attention", "MLP"):
        table.add_column(name, justify="right")
    table.add_column(min_width=BAR_WIDTH)
    for index, error in enumerate(card.layers):
        table.add_row(
            str(index),
            f"{error.stream:.1%}",
            f"{error.attention:.1%}",
            f"{error.mlp:.1%}",
            Text(bar(error.stream / highest), style="blue"),
        )
    return Group(Text("\nrelative error by layer", style="bold"), table, Text())
