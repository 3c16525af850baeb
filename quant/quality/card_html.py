"""Renders a quality card and its plots as one HTML page without scripts, fonts or requests."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from appliance.quant.quality import card_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Card, Histogram, LayerError

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 40
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
        *_kinds(card),
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


def _kinds(card: Card) -> list[str]:
    if not card.kinds:
        return []
    klds = [row.comparison.kld_mean.value for row in card.kinds]
    rows = list(map(card_rows.kind_row, card.kinds))
    table = _bars(card_rows.KINDS_HEADER, rows, klds)
    said = f'<p class="soft">{escape(card_rows.KINDS_IN_WORDS)}</p>'
    return [_section("By kind of text", said + table)]


def _kv(card: Card) -> list[str]:
    if not card.kv:
        return []
    klds = [row.comparison.kld_mean.value for row in card.kv]
    table = _bars(card_rows.KV_HEADER, list(map(card_rows.kv_row, card.kv)), klds)
    said = f'<p class="soft">{escape(card_rows.kv_in_words(card))}</p>'
    return [_section("By KV cache", said + table)]


def _bars(header: Sequence[str], rows: Sequence[Sequence[str]], values: Sequence[float]) -> str:
    """Draw a table of numbers with a bar for each row's value."""
    highest = max(values) or 1.0
    lines = []
    for row, value in zip(rows, values, strict=True):
        first, *others = map(escape, row)
        bar = f'<div class="track"><i style="width:{100 * value / highest:.1f}%"></i></div>'
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f"<tr><td>{first}{bar}</td>{cells}</tr>")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(lines)}</table></div>'


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


def histogram_plot(histogram: Histogram, mean: float, p99: float) -> str:
    """Plot tokens by KL divergence on a log axis, with mean and 99th percentile."""
    edges, counts = histogram.log10_edges, histogram.counts
    # Skip empty decades at either end.
    used = [i for i, count in enumerate(counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, len(counts))
    low, high = math.floor(edges[first]), math.ceil(edges[last])
    total = sum(counts) or 1
    shares = [100 * count / total for count in counts]
    top, ticks = _scale(max(shares, default=1.0))

    def x(log10: float) -> float:
        return _along(log10, low, high, LEFT, WIDTH - RIGHT)

    parts = _grid(top, ticks, "% of tokens")
    for i in range(first, last):
        height = (HEIGHT - TOP - BOTTOM) * shares[i] / top
        parts.append(
            f'<rect class="bar" x="{x(edges[i]) + 1:.1f}" y="{HEIGHT - BOTTOM - height:.1f}"'
            f' width="{max(1.0, x(edges[i + 1]) - x(edges[i]) - 2):.1f}" height="{height:.1f}"'
            f' rx="2"><title>{_power(edges[i])} to {_power(edges[i + 1])} nats:'
            f" {counts[i]:,} tokens ({shares[i]:.1f} %)</title></rect>"
        )
    for decade in range(low, high + 1):
        label = f"{10.0**decade:g}" if decade >= -4 else f"1e{decade}"
        parts.append(_text(x(decade), HEIGHT - BOTTOM + 16, label, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "KL divergence, nats", "middle"))
    for name, value, line in (("mean", mean, 0), ("p99", p99, 1)):
        if value > 0 and low <= math.log10(value) <= high:
            at = x(math.log10(value))
            parts.append(
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}"'
                f' y2="{HEIGHT - BOTTOM}"/>'
            )
            anchor, shift = ("end", -5) if at > WIDTH / 2 else ("start", 5)
            parts.append(_text(at + shift, TOP + 10 + 14 * line, f"{name} {value:.3g}", anchor))
    return _svg(parts, "Histogram of the KL divergence of each token")


def layers_plot(layers: Sequence[LayerError]) -> str:
    """Plot a bar per layer's residual stream, with marks for attention and MLP."""
    highest = max((max(e.stream, e.attention, e.mlp) for e in layers), default=0.0)
    top, ticks = _scale(100 * highest)
    parts = _grid(top, ticks, "error, %")
    step = (WIDTH - LEFT - RIGHT) / max(1, len(layers))
    height = HEIGHT - TOP - BOTTOM

    def y(error: float) -> float:
        return HEIGHT - BOTTOM - height * 100 * error / top

    every = max(1, round(len(layers) / 12))
    for index, error in enumerate(layers):
        left = LEFT + index * step
        middle, width = left + step / 2, max(1.0, min(28.0, step * 0.7))
        said = (
            f"layer {index}: stream {error.stream:.1%}, attention {error.attention:.1%},"
            f" MLP {error.mlp:.1%}"
        )
        parts.append(
            f'<g><title>{said}</title><rect class="bar" x="{middle - width / 2:.1f}"'
            f' y="{y(error.stream):.1f}" width="{width:.1f}"'
            f' height="{HEIGHT - BOTTOM - y(error.stream):.1f}" rx="2"/>'
            f'<circle class="second" cx="{middle:.1f}" cy="{y(error.attention):.1f}" r="3"/>'
            f'<circle class="third" cx="{middle:.1f}" cy="{y(error.mlp):.1f}" r="3"/></g>'
        )
        if index % every == 0:
            parts.append(_text(middle, HEIGHT - BOTTOM + 16, str(index), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "layer", "middle"))
    return _svg(parts, "Relative error of each layer")


def sizes_plot(points: Sequence[tuple[str, float, float, str]]) -> str:
    """Plot size against quality.

    Args:
        points: name, bits per weight, mean KL divergence, and CSS class of each mark.
    """
    top, ticks = _scale(max((kld for _, _, kld, _ in points), default=0.0) * 1.08)
    widest = max((bits for _, bits, _, _ in points), default=1.0)
    right, bit_ticks = _scale(widest * 1.05)
    parts = _grid(top, ticks, "mean KLD")

    def x(bits: float) -> float:
        return _along(bits, 0, right, LEFT, WIDTH - RIGHT)

    for tick in bit_ticks:
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "bits per weight, whole model", "middle")
    )
    taken: list[tuple[float, float]] = []
    for name, bits, kld, kind in sorted(points, key=lambda point: point[2]):
        at, up = x(bits), HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * kld / top
        parts.append(
            f'<circle class="{kind}" cx="{at:.1f}" cy="{up:.1f}" r="6">'
            f"<title>{escape(name)}: {bits:.2f} bits, KLD {kld:.4f}</title></circle>"
        )
        label = up + 4
        while any(abs(label - other) < 14 and abs(at - where) < 300 for where, other in taken):
            label -= 14  # move up past labels of lower points
        taken.append((at, label))
        anchor, shift = ("end", -11) if at > WIDTH * 0.6 else ("start", 11)
        parts.append(_text(at + shift, label, f"{name} ({kld:.3g})", anchor, "label"))
    return _svg(parts, "Size against quality")


def _scale(highest: float) -> tuple[float, list[float]]:
    """Return the end of an axis from 0, and its round ticks."""
    if not highest > 0:
        return 1.0, [0.0, 1.0]
    rough = highest / 4
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    count = math.ceil(highest / step - 1e-9)
    return step * count, [step * i for i in range(count + 1)]


def _along(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (end - start) * (value - low) / ((high - low) or 1)


def _grid(top: float, ticks: Sequence[float], title: str) -> list[str]:
    parts = []
    for tick in ticks:
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tick / top
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 7, y + 4, f"{tick:.4g}", "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="13" y="{middle}" text-anchor="middle"'
        f' transform="rotate(-90 13 {middle})">{escape(title)}</text>'
    )
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _power(log10: float) -> str:
    return f"{10.0**log10:.1e}"


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )
