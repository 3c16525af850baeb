"""`appliance lora`: lists adapters, and checks one before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.config import EngineConfig, cache_dir, load_section
from appliance.engine.run.adapters.adapter_names import AdapterRegistry
from appliance.errors import ModelError
from appliance.files import read_bytes
from appliance.wording import as_size

if TYPE_CHECKING:
    from appliance.model.adapters.adapter import Adapter

lora = typer.Typer(no_args_is_help=True, help="List adapters, or check one.")

LoraDir = Annotated[
    Path | None, typer.Option("--lora-dir", help="The folder, if not the configured one.")
]
MaxRank = Annotated[
    int | None, typer.Option("--max-lora-rank", min=1, help="Largest rank, as for serve.")
]


@lora.command()
def ls(lora_dir: LoraDir = None) -> None:
    """List the adapters of the settings and of the folder, with what their files say."""
    given = {"lora_dir": None if lora_dir is None else str(lora_dir)}
    registry = AdapterRegistry(load_section(EngineConfig, given), "")
    names = registry.names()
    if not names:
        typer.echo("there are no adapters; --lora and --lora-dir say where they are")
    width = max(map(len, names), default=0)
    for name in names:
        ref = registry.find(name)
        text = "its files are gone" if ref is None else f"{_facts(Path(ref.path))}  {ref.path}"
        typer.echo(f"{name.ljust(width)}  {text}")


@lora.command()
def check(
    path: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id of the adapter.")],
    model: Model = "",
    max_lora_rank: MaxRank = None,
) -> None:
    """Check whether an adapter can be served with a model, and say what it changes."""
    from appliance.hub import resolve_adapter, resolve_model
    from appliance.model.adapters.reader import read_adapter
    from appliance.model.source import open_model
    from appliance.progress.progress import ProgressLine

    settings = load_section(EngineConfig, {"max_lora_rank": max_lora_rank})
    with ProgressLine() as progress:
        base = resolve_model(model or settings.model, cache_dir=cache_dir(), progress=progress)
        found = resolve_adapter(path, progress=progress)
    adapter = read_adapter(found, open_model(base.path), settings.max_lora_rank)
    typer.echo(f"{found} fits {base.name}: {_description(adapter)}")
    for note in adapter.notes:
        typer.echo(f"warning: {note}", err=True)


def _description(adapter: Adapter) -> str:
    return (
        f"rank {adapter.rank}, {adapter.num_parameters:,} parameters in {len(adapter.parts)}"
        f" linears ({', '.join(adapter.modules)})"
    )


def _facts(path: Path) -> str:
    """Describe an adapter by its settings, without its weights."""
    from appliance.model.adapters.peft_settings import CONFIG_NAME, read_settings

    if path.is_file():
        return as_size(path.stat().st_size)
    config = path / CONFIG_NAME
    try:
        settings = read_settings(config, read_bytes(config))
    except (ModelError, OSError) as error:
        return f"cannot be used: {error}"
    base = f" on {settings.base}" if settings.base else ""
    return f"rank {settings.rank}{base}"
