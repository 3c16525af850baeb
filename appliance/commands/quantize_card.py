"""Ends `appliance quantize` by measuring the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.progress.quantize_events import OnEvent
    from appliance.quant.run.report import QuantizeReport


def make_card_of_run(
    report: QuantizeReport, base: Path, tokens: int, max_ram: int | None, on_event: OnEvent
) -> None:
    """Save a run's facts beside its weights, then measure these and write their card.

    The weights are already safe. If this fails or is killed, `appliance evaluate` makes the same
    card later.

    Args:
        base: the unquantized model.
        tokens: number to measure on; 0 makes no card.
        max_ram: limit of the process's memory in bytes; None takes the free memory.
    """
    from appliance.progress.progress import ProgressLine
    from appliance.progress.quantize_events import CardWritten, Measuring
    from appliance.quant.quality.card import HTML_NAME, beside
    from appliance.quant.quality.card_files import write_card
    from appliance.quant.quality.make_card import CardOptions, make_card
    from appliance.quant.quality.run_facts import keep_facts
    from appliance.quant.run.evaluation_memory import CARD_WINDOW
    from appliance.quant.text.held_out import HeldOutText

    try:
        keep_facts(report)
        if not tokens:
            return
        text = HeldOutText(None, tokens, min(CARD_WINDOW, tokens))
        options = CardOptions(text=text, max_ram=max_ram)
        with ProgressLine() as progress:

            def tell(stage: str, done: int, total: int) -> None:
                progress(stage, done, total)
                on_event(Measuring(stage=stage, done=done, total=total))

            card = make_card(report.out, base, options, on_progress=tell)
        path = write_card(card, report.out)
    except ApplianceError as error:
        typer.echo(
            f"note: the weights are done, but there is no quality card: {error}; make one with:"
            f" appliance evaluate {report.out} --against {base}",
            err=True,
        )
        return
    if card.comparison is not None:
        on_event(
            CardWritten(
                path=str(path),
                kld_mean=card.comparison.kld_mean.value,
                same_top_percent=card.comparison.same_top_percent.value,
            )
        )
    typer.echo(f"quality: {card.line()}", err=True)
    for name, found in ((row.format, row.comparison) for row in card.kv):
        typer.echo(
            f"  with a KV cache of {name}: mean KLD {found.kld_mean.value:.4f} more,"
            f" same top {found.same_top_percent.value:.1f} %",
            err=True,
        )
    typer.echo(
        f"the card: {beside(report.out, HTML_NAME)}, or: appliance card {report.out}", err=True
    )
