"""`appliance cache`: the KV cache and the packed weights that servers keep on disk."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.config import EngineConfig, kv_dir, load_section, packed_dir, parse_duration
from appliance.errors import ConfigError
from appliance.wording import age_in_words, as_size, counted

if TYPE_CHECKING:
    from appliance.engine.packed_models import KeptFile
    from appliance.engine.tiers.stored_models import StoredModel

cache = typer.Typer(
    no_args_is_help=True,
    help="List or remove the KV cache of long prompts and the packed weights that servers keep on"
    " the disk.",
)

KVFolder = Annotated[
    Path | None, typer.Option("--kv-disk", help="The folder of KV cache, if not the usual one.")
]
PackedFolder = Annotated[
    Path | None,
    typer.Option("--packed-weights", help="The folder of packed weights, if not the usual one."),
]


@cache.command()
def ls(
    kv_disk: KVFolder = None,
    packed_weights: PackedFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List what is kept: of each model the KV formats and packed weights, the latest used first."""
    kept = _Kept.of(kv_disk, packed_weights)
    if as_json:
        rows = [*map(_as_dict, kept.models), *map(_file_as_dict, kept.files)]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not kept.models and not kept.files:
        typer.echo(f"nothing is kept in {' and '.join(map(str, kept.roots))}")
        return
    table: list[tuple[str, ...]] = [
        ("id", "model", "KV cache", "blocks", "states", "size", "last used")
    ]
    table += [*map(_row, kept.models), *map(_row_of_file, kept.files)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@cache.command()
def du(kv_disk: KVFolder = None, packed_weights: PackedFolder = None) -> None:
    """Show the disk space that all that is kept takes."""
    kept = _Kept.of(kv_disk, packed_weights)
    if kept.kv is not None:
        files = _in_words(
            sum(model.num_blocks for model in kept.models),
            sum(model.num_states for model in kept.models),
        )
        size = as_size(sum(model.num_bytes for model in kept.models))
        typer.echo(f"{size} in {files} of {counted(len(kept.models), 'model')}: {kept.kv}")
    if kept.packed is not None:
        size = as_size(sum(file.num_bytes for file in kept.files))
        typer.echo(f"{size} in {counted(len(kept.files), 'file')} of packed weights: {kept.packed}")


@cache.command()
def rm(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids as `ls` shows them, or their beginnings.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all models.")] = False,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was not used for so long, such as 12h or 30d.")
    ] = None,
    kv_disk: KVFolder = None,
    packed_weights: PackedFolder = None,
) -> None:
    """Remove what is kept of some models, or of all; servers may be running."""
    from appliance.engine.tiers.stored_models import Removed, remove_models

    if not ids and not everything and older_than is None:
        raise ConfigError("name ids from `appliance cache ls`, or --all, or --older-than")
    if ids and everything:
        raise ConfigError("ids and --all were given; leave one of them out")
    since = None if older_than is None else time.time() - parse_duration(older_than)
    kept = _Kept.of(kv_disk, packed_weights)
    chosen = kept.chosen(ids) if ids else None
    removed = Removed(0, 0, 0)
    files: list[KeptFile] = []
    try:
        if kept.kv is not None:
            removed = remove_models(kept.kv, chosen, older_than=since)
        for file in kept.files:
            if (chosen is None or file.id in chosen) and (since is None or file.used < since):
                file.path.unlink(missing_ok=True)
                files.append(file)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from None
    if kept.kv is not None:
        words = _in_words(removed.blocks, removed.states)
        typer.echo(f"removed {as_size(removed.num_bytes)} in {words}")
    if files:
        size = as_size(sum(file.num_bytes for file in files))
        typer.echo(f"removed {size} in {counted(len(files), 'file')} of packed weights")


@dataclass(frozen=True, slots=True)
class _Kept:
    """The contents of the folders that a command is about.

    Attributes:
        kv: folder of KV cache; None if the command is about the other alone.
        packed: folder of packed weights, likewise.
    """

    kv: Path | None
    packed: Path | None
    models: list[StoredModel]
    files: list[KeptFile]

    @classmethod
    def of(cls, kv: Path | None, packed: Path | None) -> _Kept:
        """Look into the folders that are named, or else into those of the settings."""
        from appliance.engine.packed_models import kept_files
        from appliance.engine.tiers.stored_models import stored_models

        if kv is None and packed is None:
            settings = load_section(EngineConfig, {})
            kv = kv_dir() if settings.kv_disk in ("auto", "off") else Path(settings.kv_disk)
            packed = Path(settings.packed_weights)
            if settings.packed_weights in ("auto", "off"):
                packed = packed_dir()
        kv = None if kv is None else kv.expanduser()
        packed = None if packed is None else packed.expanduser()
        models = [] if kv is None else stored_models(kv)
        files = [] if packed is None else sorted(kept_files(packed), key=lambda file: -file.used)
        return cls(kv, packed, models, files)

    @property
    def roots(self) -> list[Path]:
        return [root for root in (self.kv, self.packed) if root is not None]

    def chosen(self, ids: list[str]) -> list[str]:
        """Return the whole ids that begin as these do.

        Raises:
            ConfigError: one is none's, or several ones'.
        """
        known = [model.fingerprint for model in self.models] + [file.id for file in self.files]
        chosen = []
        for one in ids:
            found = [whole for whole in known if whole.startswith(one.lower())]
            if len(found) != 1:
                many = "more than one model's" if found else "no model's"
                raise ConfigError(f"{one!r} is {many} id; see `appliance cache ls`")
            chosen += found
        return chosen


def _in_words(blocks: int, states: int) -> str:
    """Count blocks, and state checkpoints if there are any."""
    found = counted(blocks, "block")
    return f"{found} and {counted(states, 'state checkpoint')}" if states else found


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


def _file_as_dict(file: KeptFile) -> dict[str, object]:
    return {
        "id": file.id,
        "model": file.model(),
        "packed_weights": True,
        "bytes": file.num_bytes,
        "used": file.used,
    }


def _row_of_file(file: KeptFile) -> tuple[str, ...]:
    return (
        file.id[:12],
        file.model() or "?",
        "packed weights",
        "-",
        "-",
        as_size(file.num_bytes),
        age_in_words(time.time() - file.used),
    )
