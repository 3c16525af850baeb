"""`appliance evaluate --lm-eval`: runs tasks on a server and adds their scores to the card."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path


def evaluate_tasks(
    model: str,
    tasks: str,
    url: str | None,
    include: Path | None,
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    """Run tasks, print their scores, and add them to the model's card if it has one.

    Args:
        model: the served model; its tokenizer must be on this machine.
        tasks: names, separated by commas.
        url: the server's; None takes it from the settings.
        include: folder with your own tasks.
        limit: maximum number of questions per task.
    """
    import msgspec

    from appliance.config import TopConfig, cache_dir, load_section, server_to_watch
    from appliance.hub import resolve_model
    from appliance.progress.progress import ProgressLine
    from appliance.quant.quality import card_rows
    from appliance.quant.quality.card import card_of
    from appliance.quant.quality.card_files import write_card
    from appliance.quant.quality.harness import run_tasks

    url, key = server_to_watch(load_section(TopConfig, {"url": url}).url)
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
    scores = run_tasks(
        url,
        tasks,
        resolved.path,
        api_key=key,
        include=include,
        limit=limit,
    )
    if as_json:
        typer.echo(msgspec.json.encode(scores))
    else:
        for score in scores:
            typer.echo("  ".join(card_rows.task_row(score)))
    if (card := card_of(resolved.path)) is not None:
        again = {(score.task, score.metric) for score in scores}
        kept = (score for score in card.tasks if (score.task, score.metric) not in again)
        path = write_card(replace(card, tasks=(*kept, *scores)), resolved.path)
        typer.echo(f"added to {path}", err=True)
