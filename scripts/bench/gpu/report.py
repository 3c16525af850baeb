"""Write what a run measured for people: goals, failures, then every measurement."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.goals import Verdict, verdicts
from bench.gpu.plan import SUITES
from bench.gpu.results import Results

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
TIMED = ("matmul", "decode", "prefill", "layer_ops")
Row = dict[str, Any]


def write(folder: Path) -> str:
    """Write report.md and report.json beside the rows.

    Returns:
        The goals in Markdown.
    """
    results = Results.read(folder)
    run = results.runs[-1]
    device = run["gpu"].get("name", "no GPU")
    goals = verdicts(results, device)
    failed = [
        {"suite": suite, **row} for (suite, _), row in results.rows.items() if "failed" in row
    ]
    report = {
        "run": run,
        "goals": [asdict(goal) for goal in goals],
        "suites": list(results.ends.values()),
        "failed": failed,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    table = goals_table(goals)
    sections = [f"# {device}", _conditions(run), "## Goals", table, "## Suites", _suites(results)]
    sections += ["## Failed", _failures(failed)]
    sections += ["## Correctness", _notes(results, "correctness")]
    sections += ["## Kernels", kernels_table(results)]
    engine = _notes(results, "start", "engine", "peer_engine", "real_model")
    sections += ["## Engine", engine]
    (folder / "report.md").write_text("\n\n".join(sections) + "\n")
    return table


def goals_table(goals: list[Verdict]) -> str:
    """Format the goals, reached or not, or why that is not known."""
    lines = ["| what | against | goal | worst case | reached | where |", "| --- " * 6 + "|"]
    words = {True: "yes", False: "NO", None: "not measured"}
    for goal in goals:
        value = "-" if goal.value is None else f"{goal.value:g}"
        lines.append(
            f"| {goal.what} | {goal.against} | {goal.goal} | {value} | "
            f"{words[goal.is_reached]} | {goal.where} |"
        )
    return "\n".join(lines)


def kernels_table(results: Results) -> str:
    """Format a line for each of our times with its share of copy and multiples of peers."""
    rows = [row for row in results.of(*TIMED) if "us" in row]
    peers = defaultdict(list)
    for row in rows:
        if row["key"]["who"] != "ours":
            peers[_contest(row)].append(row)
    lines = [
        "| kernel | shape | us (min-max) | share of copy | TFLOP/s | ours as a multiple of |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["key"]["who"] != "ours":
            continue
        us = row["us"]
        others = ", ".join(
            f"{peer['key']['who']} {peer['us']['median'] / us['median']:.2f}x"
            for peer in peers[_contest(row)]
        )
        lines.append(
            f"| {row['key']['kernel']} | {' '.join(_contest(row)[1:])} | {us['median']:.1f} "
            f"({us['min']:.1f}-{us['max']:.1f}) | {100 * row['share_of_copy']:.0f} % | "
            f"{row.get('tflop_per_second', '')} | {others} |"
        )
    return "\n".join(lines)


def draw(folder: Path) -> None:
    """Draw operations per byte against operations per second, under the roof of copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = Results.read(folder)
    gpu = results.runs[-1]["gpu"]
    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=120)
    points = defaultdict(list)
    for row in results.of(*TIMED):
        if row["key"]["who"] == "ours" and "tflop_per_second" in row:
            rate = row["tflop_per_second"]
            points[row["key"]["kernel"]].append((1000 * rate / row["gb_per_second"], rate))
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
    figure.savefig(folder / "roofline.png")
    pyplot.close(figure)


def _conditions(run: Row) -> str:
    gpu = run["gpu"]
    facts = {
        "plan": run["amount"],
        "time": run["time"],
        "commit": run["commit"] or "unknown",
        **run["packages"],
        **{name: value for name, value in gpu.items() if name not in ("name", "device")},
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _suites(results: Results) -> str:
    lines = []
    for suite in SUITES:
        rows = list(results.of(suite.name))
        end = results.ends.get(suite.name)
        state = "not run" if end is None else f"{end['seconds']} s; {end['end'] or 'complete'}"
        failed = sum("failed" in row for row in rows)
        lines.append(f"- {suite.name}: {len(rows)} rows, {failed} failed; {state}")
    return "\n".join(lines)


def _failures(failed: list[Row]) -> str:
    lines = [f"- {row['suite']} {_key(row)}: {row['failed']}" for row in failed]
    return "\n".join(lines) or "Nothing."


def _notes(results: Results, *suites: str) -> str:
    lines = []
    for row in results.of(*suites):
        if "failed" not in row:
            found = {name: value for name, value in row.items() if name not in ("key", "suite")}
            lines.append(f"- {_key(row)}: {json.dumps(found)}")
    return "\n".join(lines) or "Nothing was measured."


def _key(row: Row) -> str:
    return ", ".join(
        f"{name} {value}" if isinstance(value, int) else str(value)
        for name, value in row["key"].items()
        if value != "ours"
    )


def _contest(row: Row) -> tuple[str, ...]:
    key = row["key"]
    sizes = [f"{name}={value}" for name, value in key.items() if type(value) is int]
    return (key["kernel"], key["shape"], *sizes)
