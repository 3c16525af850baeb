"""`appliance cache`: the KV cache that servers keep on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.config import EngineConfig, kv_dir, load_section, parse_duration
from appliance.errors import ConfigError
from appliance.wording import age_in_words, as_size, counted

if TYPE_CHECKING:
    from appliance.engine.tiers.stored_models import StoredModel

cache = typer.Typer(
    no_args_is_help=True,
    help="List or remove the KV cache of long prompts that servers keep on the disk.",
)

Folder = Annotated[Path | None, typer.Option("--kv-disk", help="The folder, if not the usual one.")]


@cache.command()
def ls(
    kv_disk: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the kept caches: each model and KV format, the most recently used first."""
    from appliance.engine.tiers.stored_models import stored_models

    root = _root(kv_disk)
    models = stored_models(root)
    if as_json:
        typer.echo(json.dumps([_as_dict(model) for model in models], indent=2))
        return
    if not models:
        typer.echo(f"nothing is kept in {root}")
        return
    rows: list[tuple[str, ...]] = [
        ("id", "model", "KV cache", "blocks", "states", "size", "last used")
    ]
    rows += [_row(model) for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@cache.command()
def du(kv_disk: Folder = None) -> None:
    """Show the disk space that all kept caches take."""
    from appliance.engine.tiers.stored_models import stored_models

    root = _root(kv_disk)
    models = stored_models(root)
    files = _in_words(
        sum(model.num_blocks for model in models), sum(model.num_states for model in models)
    )
    size = as_size(sum(model.num_bytes for model in models))
    typer.echo(f"{size} in {files} of {counted(len(models), 'model')}: {root}")


@cache.command()
def rm(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids as `ls` shows them, or their beginnings.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all models.")] = False,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was not used for so long, such as 12h or 30d.")
    ] = None,
    kv_disk: Folder = None,
) -> None:
    """Remove the kept caches of some models, or all; servers may be running."""
    from appliance.engine.tiers.stored_models import remove_models

    root = _root(kv_disk)
    if not ids and not everything and older_than is None:
        raise ConfigError("name ids from `appliance cache ls`, or --all, or --older-than")
    if ids and everything:
        raise ConfigError("ids and --all were given; leave one of them out")
    since = None if older_than is None else time.time() - parse_duration(older_than)
    chosen = _chosen(root, ids) if ids else None
    try:
        removed = remove_models(root, chosen, older_than=since)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from None
    files = _in_words(removed.blocks, removed.states)
    typer.echo(f"removed {as_size(removed.num_bytes)} in {files}")


def _in_words(blocks: int, states: int) -> str:
    """Count blocks, and state checkpoints if there are any."""
    found = counted(blocks, "block")
    return f"{found} and {counted(states, 'state checkpoint')}" if states else found


def _root(kv_disk: Path | None) -> Path:
    if kv_disk is not None:
        return kv_disk.expanduser()
    setting = load_section(EngineConfig, {}).kv_disk
    return kv_dir() if setting in ("auto", "off") else Path(setting).expanduser()


def _chosen(root: Path, ids: list[str]) -> list[str]:
    from appliance.engine.tiers.stored_models import stored_models

    known = [model.fingerprint for model in stored_models(root)]
    chosen = []
    for one in ids:
        found = [fingerprint for fingerprint in known if fingerprint.startswith(one.lower())]
        if len(found) != 1:
            many = "more than one model's" if found else "no model's"
            raise ConfigError(f"{one!r} is {many} id; see `appliance cache ls`")
        chosen += found
    return chosen


def _as_dict(model: StoredModel) -> dict[str, object]:
    return {
        "id": model.fingerprint,
        **{key: model.about.get(key) for key in ("model", "kv_format", "block_size", "backend")},
        "blocks": model.num_blocks,
        "states": model.num_states,
        "bytes": model.num_bytes,
        "used": model.used,
    }


def _row(model: StoredModel) -> tuple[str, ...]:
    return (
        model.fingerprint[:12],
        str(model.about.get("model", "?")),
        str(model.about.get("kv_format", "?")),
        f"{model.num_blocks:,}",
        f"{model.num_states:,}" if model.num_states else "-",
        as_size(model.num_bytes),
        age_in_words(time.time() - model.used) if model.num_bytes else "-",
    )
