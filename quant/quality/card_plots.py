"""Draws a quality card's plots as inline SVG, coloured by the page's CSS classes."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Histogram, LayerError

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 40


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
