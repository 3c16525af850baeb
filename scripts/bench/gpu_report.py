"""What a run of the kernel benchmark showed: a table for people, and the roofline picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def write(path: Path) -> None:
    """Print the table in Markdown; draw beside the result a picture of the same name."""
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if "us" in row]
    print(table(rows, result["gpu"]))
    draw(rows, result["gpu"], path.with_suffix(".png"))


def table(rows: list[dict[str, Any]], gpu: dict[str, Any]) -> str:
    """One line for each of our measurements: time, share of copy, speed as a multiple of peers."""
    peers = defaultdict(list)
    for row in rows:
        if "ours_as_multiple" in row:
            peers[_what(row)].append(f"{row['who']} {row['ours_as_multiple']:.2f}x")
    lines = [
        f"{gpu.get('name', 'no GPU')}, copy {gpu['copy_gb_per_second']:,} GB/s",
        "",
        "| kernel | shape | us | share of copy | TFLOP/s | ours as a multiple of |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["who"] != "ours":
            continue
        lines.append(
            f"| {row['kernel']} | {' '.join(_size(row))} | {row['us']['median']:.1f} | "
            f"{100 * row['share_of_copy']:.0f} % | {row.get('tflop_per_second', '')} | "
            f"{', '.join(peers[_what(row)])} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], gpu: dict[str, Any], path: Path) -> None:
    """Operations per byte against operations per second, under the roof of the copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=120)
    points = defaultdict(list)
    for row in rows:
        if row["who"] == "ours" and "tflop_per_second" in row:
            rate = row["tflop_per_second"]
            points[row["kernel"]].append((1000 * rate / row["gb_per_second"], rate))
    for colour, (kernel, values) in zip(COLOURS * 3, sorted(points.items()), strict=False):
        axes.scatter(*zip(*values, strict=True), s=18, color=colour, label=kernel)
    intensities = [1.0, 10.0, 100.0, 1000.0]
    roof = [gpu["copy_gb_per_second"] * intensity / 1000 for intensity in intensities]
    axes.plot(intensities, roof, color="#888888", linewidth=1, label="copy bandwidth")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.set_title(f"{gpu.get('name', 'no GPU')}: our kernels under the memory's roof")
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def _what(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["kernel"], *_size(row))


def _size(row: dict[str, Any]) -> list[str]:
    sizes = [f"{name}={value}" for name, value in row.items() if type(value) is int]
    return [row["shape"], *sizes]
