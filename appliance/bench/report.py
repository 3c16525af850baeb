"""Formats a measurement as text to read and post."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_HEADS = (
    "at once",
    "tokens/s, all",
    "tokens/s, each",
    "first token p50 / p99, ms",
    "between tokens p50 / p99, ms",
)
_POSTED = (
    "card", "model", "weights", "tokens/s of one stream, median (least to most)", "settings",
    "with", "posted by",
)  # fmt: skip


def as_text(result: dict[str, Any]) -> str:
    """Write the report in Markdown; `result` is the output of `appliance bench --json`."""
    machine, model = result["machine"], result["model"]
    versions = {"python": machine["python"], **machine["packages"]}
    facts = [
        ("appliance", f"{result['version']}, {machine['time']}"),
        ("machine", f"{machine['cpu']}, {machine['cores']} processors"),
        ("load", f"{machine['load_average'][0]} before the run, by the system's average"),
        ("model", "; ".join([model["id"], *(f"{k} {v}" for k, v in model["about"].items())])),
        ("versions", ", ".join(f"{name} {one}" for name, one in versions.items() if one)),
    ]
    driver = machine.get("gpu_driver", "unknown")
    if driver != "unknown":
        facts.append(("GPU", f"{_card(result)}, driver {driver}"))
    if started := result.get("started"):
        facts.append(
            (
                "server",
                f"ready after {started['ready_seconds']} s, then"
                f" {started['memory']['pss_mb']} MB in {started['memory']['processes']} processes",
            )
        )
    load = result["load"]
    facts.append(
        (
            "load shape",
            f"{load['repeats']} bursts at each; answers of {load['max_tokens']} tokens, prompts of"
            f" {result['levels'][0]['prompt_tokens_mean']:g} that begin differently",
        )
    )
    width = max(len(name) for name, _ in facts) + 2
    lines = [f"{name:{width}}{text}" for name, text in facts]
    rows = [_row(level) for level in result["levels"]]
    table = [f"| {' | '.join(_HEADS)} |", "| ---: " * len(_HEADS) + "|"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    prefill = result["prefill"]
    last = (
        f"A prompt of {prefill['prompt_tokens']} tokens alone:"
        f" {_range(prefill['tokens_per_second'])} tokens/s until the first token, which came after"
        f" {prefill['first_token_ms']['p50']:g} ms."
    )
    return "\n".join(["```", *lines, "```", "", *table, "", last, *_row_to_post(result)])


def _row_to_post(result: dict[str, Any]) -> list[str]:
    """Return a row for the table of cards in the documentation, if a GPU was measured."""
    about, machine, level = result["model"]["about"], result["machine"], result["levels"][0]
    driver = machine.get("gpu_driver", "unknown")
    if driver == "unknown" or level["streams"] != 1:
        return []
    load, speed = result["load"], _range(level["decode_tokens_per_second_each"])
    settings = (
        f"prompts of {level['prompt_tokens_mean']:g}, answers of {load['max_tokens']} tokens,"
        f" {load['repeats']} bursts, {_drafts(load)}"
    )
    packages = machine["packages"]
    made = f"appliance {result['version']}, driver {driver}, torch {packages['torch']}"
    made += f", triton {packages['triton']}, {machine['time'][:10]}"
    kept = f"{about.get('weights', '')}; KV {about.get('KV cache', 'unknown')}"
    cells = (_card(result), result["model"]["id"], kept, speed, settings, made, "")
    return [
        "",
        "To post, as a row of the measured cards (`appliance docs benchmarks` has the table): put"
        " your name into the last cell, and send it with all of the above.",
        "",
        f"| {' | '.join(_POSTED)} |",
        "| --- | --- | --- | ---: | --- | --- | --- |",
        f"| {' | '.join(cells)} |",
    ]


def _card(result: dict[str, Any]) -> str:
    name: str = result["model"]["about"].get("on", "unknown")
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _drafts(load: dict[str, Any]) -> str:
    """Say how many tokens of the answers were drafted, which makes them faster."""
    accepted = load.get("accepted_tokens")
    return "drafts unknown" if accepted is None else f"{accepted} tokens from drafts"


def _row(level: dict[str, Any]) -> tuple[str, ...]:
    first, between = level["first_token_ms"], level["between_tokens_ms"]
    return (
        str(level["streams"]),
        _range(level["output_tokens_per_second"]),
        _range(level["decode_tokens_per_second_each"]),
        f"{first['p50']:g} / {first['p99']:g}",
        f"{between['p50']:g} / {between['p99']:g}",
    )


def _range(values: dict[str, float]) -> str:
    return f"{values['median']:,.1f} ({values['min']:,.1f} to {values['max']:,.1f})"


def machine_facts() -> dict[str, Any]:
    """Return time, processor, load, and the versions of Python and the compute libraries."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "triton", "transformers")},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
