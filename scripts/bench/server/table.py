"""Print measured servers side by side, with the ratio of ours to each."""

from __future__ import annotations

from typing import Any


def add_ratios(rows: list[dict[str, Any]], ours: str = "ours") -> None:
    """Add to each other row our rates as multiples of its own, where both were undisturbed."""
    measured = {row["name"]: row for row in rows if "sweep" in row}
    if ours not in measured:
        return
    own = _rates(measured[ours], only_quiet=True)
    for name, row in measured.items():
        if name != ours:
            theirs = _rates(row, only_quiet=True)
            row["ours_as_multiple"] = {
                level: round(own[level] / theirs[level], 2) for level in theirs if level in own
            }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print output tokens per second at each number of clients, prefill, start and memory."""
    measured = [row for row in rows if "sweep" in row]
    if not measured:
        return
    names = list(_rates(measured[0]))
    print(
        f"{'server':<19}"
        + "".join(f"{name:>16}" for name in names)
        + "   start s  PSS MB (before/after)"
    )
    for row in measured:
        rates, ratios = _rates(row), row.get("ours_as_multiple", {})
        disturbed = {_name(level) for level in _levels(row) if _is_disturbed(level)}
        cells = ""
        for name in names:
            ratio = f" ({ratios[name]:.2f}x)" if name in ratios else ""
            cells += f"{rates[name]:g}{'*' if name in disturbed else ''}{ratio}".rjust(16)
        start = row["start"]["healthy_seconds"]
        before, after = (row[f"memory_{when}_load"]["pss_mb"] for when in ("before", "after"))
        print(f"{row['name']:<19}{cells}{start:>10.2f}{f'{before}/{after}':>18}")
    print("tokens per second; (ours as a multiple of it, where neither was disturbed)")
    if any(_is_disturbed(level) for row in measured for level in _levels(row)):
        print("* too few quiet repeats: other programs used the machine")


def _levels(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [*row["sweep"], row["prefill"]]


def _name(level: dict[str, Any]) -> str:
    return f"c={level['concurrency']}" if "concurrency" in level else "prefill"


def _is_disturbed(level: dict[str, Any]) -> bool:
    return bool(level["quiet_repeats"] < level["repeats"])


def _rates(row: dict[str, Any], *, only_quiet: bool = False) -> dict[str, float]:
    return {
        _name(level): _rate(level)["median"]
        for level in _levels(row)
        if not (only_quiet and _is_disturbed(level))
    }


def _rate(level: dict[str, Any]) -> dict[str, float]:
    key = "output_tokens_per_second" if "concurrency" in level else "tokens_per_second"
    rate: dict[str, float] = level[key]
    return rate
