"""Renders a quality card as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.quant.quality import card_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Card


def to_markdown(card: Card) -> str:
    sections = [f"# Quality of {card.model.name}", f"{card.line()}."]
    against = "" if card.base is None else f", beside {card.base.name}"
    sections.append(
        f"Measured on held-out text{against}: dequantized weights, float32 arithmetic."
        " KL divergence in nats, base first; \u00b1 is one standard error."
    )
    sections.append(_table(("measure", "value"), card_rows.measures(card)))
    if rows := card_rows.alternatives(card):
        sections += ["## Size against quality", _table(card_rows.ALTERNATIVES_HEADER, rows)]
    if card.kv:
        sections += [
            "## KV cache",
            card_rows.kv_in_words(card),
            _table(card_rows.KV_HEADER, [card_rows.kv_row(row) for row in card.kv]),
        ]
    if card.tasks:
        rows = list(map(card_rows.task_row, card.tasks))
        sections += ["## Tasks (lm-eval)", _table(card_rows.TASKS_HEADER, rows)]
    if card.layers:
        rows = [
            (str(index), f"{error.stream:.2%}", f"{error.attention:.2%}", f"{error.mlp:.2%}")
            for index, error in enumerate(card.layers)
        ]
        header = ("layer", "residual stream", "attention's output", "MLP's output")
        sections += ["## Relative error by layer", _table(header, rows)]
    sections += ["## Facts", _table(("", ""), card_rows.facts(card))]
    if notes := card_rows.notes(card):
        sections += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(sections) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:" if len(header) > 2 else "---"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
