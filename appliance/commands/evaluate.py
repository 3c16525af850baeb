"""`appliance evaluate`: makes the quality card of any checkpoint, or adds scores of tasks to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.model_argument import Model


def evaluate(
    model: Model = "",
    against: Annotated[
        str, typer.Option(help="Base to compare with: the 16-bit model it was made from.")
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text file or folder.",
            show_default="help topics that calibration leaves out",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read; 0 reads the whole text.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens read in one piece.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from window to window.", show_default="the window"),
    ] = None,
    kv: Annotated[
        str, typer.Option(help="KV caches to measure, separated by commas: all, none or names.")
    ] = "all",
    kv_tokens: Annotated[int, typer.Option(help="Tokens to measure them on.")] = 1024,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Folder whose card is shown beside; repeatable.")
    ] = None,
    rounding: Annotated[
        bool, typer.Option(help="Measure rounding to nearest in the same form, as a yardstick.")
    ] = True,
    kinds: Annotated[
        bool, typer.Option(help="Measure prose, code, other languages, chats and tool calls too.")
    ] = True,
    calls: Annotated[
        bool, typer.Option(help="Let the model and its base call tools, and count right calls.")
    ] = True,
    pictures: Annotated[
        Path | None,
        typer.Option(
            help="Folder of pictures, each with a text about it (cat.jpg, cat.txt) or without:"
            " measure the loss of the texts behind them.",
            show_default=False,
        ),
    ] = None,
    lm_eval: Annotated[
        str, typer.Option(help="Tasks of lm-evaluation-harness instead, through --url.")
    ] = "",
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server of MODEL, for --lm-eval.",
            show_default="the address that the settings give our server",
        ),
    ] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option(help="Folder with lm-eval tasks of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each lm-eval task.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the card.", show_default="beside the weights")
    ] = None,
    device: Annotated[str, typer.Option(help="Where it is measured: auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Measure a checkpoint and write its quality card: JSON, Markdown and HTML.

    With --lm-eval, tasks are run through a server that runs already, and their scores join the
    card that the checkpoint has.
    """
    if lm_eval:
        evaluate_tasks(model, lm_eval, url, tasks_folder, limit, as_json=as_json)
        return
    import torch

    from appliance.commands.card import show
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress.progress import ProgressLine
    from appliance.quant.quality.card import to_json
    from appliance.quant.quality.card_files import write_card
    from appliance.quant.quality.kv_caches import parse_kv_formats
    from appliance.quant.quality.make_card import CardOptions, make_card
    from appliance.quant.run.options import choose_device
    from appliance.quant.text.held_out import HeldOutText

    options = CardOptions(
        text=HeldOutText(text, tokens or None, window, stride),
        kv=parse_kv_formats(kv),
        kv_tokens=kv_tokens,
        rounding=rounding,
        kinds=kinds,
        calls=calls,
        pictures=pictures,
        compare=tuple(compare or ()),
        device=torch.device(choose_device(device)),
    )
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        base = None
        if against:
            base = resolve_model(against, cache_dir=cache_dir(), progress=progress).path
        found = make_card(resolved.path, base, options, on_progress=progress)
    path = write_card(found, resolved.path, out)
    if as_json:
        typer.echo(to_json(found), nl=False)
    else:
        show(found)
    typer.echo(f"written to {path.parent}", err=True)


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
