"""Renders a quality card as one HTML page without scripts, fonts or requests."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from appliance.quant.quality import card_rows
from appliance.quant.quality.card_plots import histogram_plot, layers_plot, sizes_plot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Card

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --paper: #ffffff; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8;
  --bar: #3f7fd1; --second: #d9822b; --third: #2a9d78; --mark: #c0392b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --paper: #1d2126; --ink: #e6e9ed; --soft: #98a2ad; --line: #31373f;
  --bar: #5b9bea; --second: #f0a04b; --third: #45c19a; --mark: #ff7b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.1rem 1.25rem; margin-top: 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem;
  margin-top: 1.2rem; }
.tiles section { margin: 0; } .tiles b { display: block; font-size: 1.7rem; line-height: 1.2;
  font-variant-numeric: tabular-nums; } .tiles span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right;
  white-space: nowrap; padding: .35rem 0 .35rem .9rem; }
.numbers td:first-child { width: 40%; }
.facts td:first-child { color: var(--soft); white-space: nowrap; padding-right: 1.5rem; }
.track { background: var(--line); border-radius: 3px; height: 6px; margin-top: .25rem; }
.track i { display: block; background: var(--bar); border-radius: 3px; height: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg .label { fill: var(--ink); }
svg .grid { stroke: var(--line); } svg .bar { fill: var(--bar); }
svg .second { fill: var(--second); } svg .third { fill: var(--third); }
svg .mark { stroke: var(--mark); stroke-dasharray: 4 3; } svg .base { fill: var(--soft); }
.key span { margin-right: 1.1rem; } .key i { display: inline-block; width: .7rem; height: .7rem;
  border-radius: 50%; margin-right: .35rem; }
ul { margin: 0; padding-left: 1.2rem; }
"""


def to_html(card: Card) -> str:
    name = escape(card.model.name)
    body = [
        f"<h1>{name}</h1>",
        f'<p class="soft">{escape(_subtitle(card))}</p>',
        _tiles(card),
        *_plots(card),
        *_kv(card),
        *_tasks(card),
        _section("All measures", _table((), card_rows.measures(card), "facts")),
        _section("Facts", _table((), card_rows.facts(card), "facts")),
    ]
    if notes := card_rows.notes(card):
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        body.append(_section("Notes", f"<ul>{items}</ul>"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Quality of {name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(card: Card) -> str:
    parts = [card.model.architecture, card.model.weights]
    if card.quantize is not None:
        parts.append(card.quantize.method)
    if card.base is not None:
        parts.append(f"beside {card.base.name}")
    return ", ".join(parts)


def _tiles(card: Card) -> str:
    tiles = [(f"{card.model.bits_per_weight:.2f}", "bits per weight, scales included")]
    found = card.comparison
    if found is None:
        tiles.append((f"{card.perplexity.value:.2f}", "perplexity"))
    else:
        tiles = [
            (f"{found.kld_mean.value:.4f}", "mean KL divergence, nats"),
            (f"{found.same_top_percent.value:.1f} %", "same likeliest token as the base"),
            (
                f"\u00d7{found.perplexity_ratio.value:.3f}",
                f"perplexity: {found.perplexity.value:.2f} against"
                f" {found.base_perplexity.value:.2f}",
            ),
            *tiles,
        ]
    return (
        '<div class="tiles">'
        + "".join(f"<section><b>{value}</b><span>{name}</span></section>" for value, name in tiles)
        + "</div>"
    )


def _plots(card: Card) -> list[str]:
    sections = []
    found, base = card.comparison, card.base
    if found is not None and card.histogram is not None:
        plot = histogram_plot(card.histogram, found.kld_mean.value, found.kld_p99)
        sections.append(_section("How far predictions moved", plot))
    if card.layers:
        key = _key(
            ("bar", "residual stream, which adds up"),
            ("second", "attention's output"),
            ("third", "MLP's output"),
        )
        sections.append(_section("Error by layer", key + layers_plot(card.layers)))
    if found is not None and base is not None:
        points = [
            (
                card_rows.ours_in_words(card),
                card.model.bits_per_weight,
                found.kld_mean.value,
                "bar",
            ),
            *((a.name, a.bits_per_weight, a.kld_mean, "second") for a in card.alternatives),
            ("the base", base.bits_per_weight, 0.0, "base"),
        ]
        table = _table(card_rows.ALTERNATIVES_HEADER, card_rows.alternatives(card), "numbers")
        sections.append(_section("Size against quality", sizes_plot(points) + table))
    return sections


def _kv(card: Card) -> list[str]:
    if not card.kv:
        return []
    highest = max(row.comparison.kld_mean.value for row in card.kv) or 1.0
    rows = []
    for row in card.kv:
        first, *others = map(escape, card_rows.kv_row(row))
        width = 100 * row.comparison.kld_mean.value / highest
        bar = f'<div class="track"><i style="width:{width:.1f}%"></i></div>'
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        rows.append(f"<tr><td>{first}{bar}</td>{cells}</tr>")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in card_rows.KV_HEADER)
    table = f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></div>'
    said = f'<p class="soft">{escape(card_rows.kv_in_words(card))}</p>'
    return [_section("By KV cache", said + table)]


def _tasks(card: Card) -> list[str]:
    if not card.tasks:
        return []
    rows = list(map(card_rows.task_row, card.tasks))
    return [_section("Tasks (lm-eval)", _table(card_rows.TASKS_HEADER, rows, "numbers"))]


def _key(*names: tuple[str, str]) -> str:
    items = "".join(
        f'<span><i style="background:var(--{kind})"></i>{name}</span>' for kind, name in names
    )
    return f'<p class="key soft">{items}</p>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [f"<tr>{head}</tr>"] if header else []
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'
