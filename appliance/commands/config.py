"""`appliance config`: shows the settings in effect, and where each comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from appliance.config import (
    SECTIONS,
    config_path,
    load_section,
    load_settings,
    written_settings,
)
from appliance.config.setting import Field, fields_of
from appliance.errors import ConfigError

config = typer.Typer(no_args_is_help=True, help="Show the settings in effect.")

File = Annotated[Path | None, typer.Option("--config", help="TOML file, if not the usual one.")]


@config.command()
def show(
    section: Annotated[
        str | None, typer.Argument(help="server, engine, top or models; without one, all.")
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say which variable or file sets it.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what differs from its default.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with origins.")] = False,
    file: File = None,
) -> None:
    """Show every setting as a command started here would read it; keys are hidden.

    Flags win over environment variables, those over the file, and that over defaults.
    """
    known = [*SECTIONS, "models"]
    if section is not None and section not in known:
        raise ConfigError(f"there is no section {section!r}; there are {', '.join(known)}")
    rows = [row for name in SECTIONS if section in (None, name) for row in _rows(name, file)]
    if section in (None, "models"):
        rows += _model_rows(file)
    rows = [row for row in rows if not changed or row[3] != "default"]
    if as_json:
        found: dict[str, dict[str, object]] = {}
        for name, key, value, where in rows:
            found.setdefault(name, {})[key] = {"value": value, "origin": where}
        typer.echo(json.dumps(found, indent=2))
        return
    before = ""
    for name, key, value, where in rows:
        if name != before:
            typer.echo(f"{'' if not before else chr(10)}[{name}]")
            before = name
        typer.echo(f"{key} = {value}" + (f"    # {where}" if origin else ""))


@config.command()
def path(file: File = None) -> None:
    """Print the configuration file that is read."""
    found = config_path(file)
    if found is None:
        raise ConfigError(
            "there is no configuration file; begin one with: appliance settings --toml >"
            " ~/.config/appliance/config.toml"
        )
    typer.echo(found)


def _rows(name: str, file: Path | None) -> list[tuple[str, str, str, str]]:
    """Return section, key, formatted value and origin of each setting in a section.

    Raises:
        ConfigError: a setting is unusable.
    """
    section = SECTIONS[name]
    written, values = written_settings(section, {}, file), load_section(section, {}, file)
    return [
        (
            name,
            key,
            _shown(field, getattr(values, key)),
            written[key].origin if key in written else "default",
        )
        for key, field in fields_of(section).items()
    ]


def _model_rows(file: Path | None) -> list[tuple[str, str, str, str]]:
    """Return such rows for the models' overrides of [engine], and for aliases."""
    settings, origin = load_settings({}, file), str(config_path(file))
    fields = fields_of(type(settings.engine))
    rows = [
        (f"models.{model.name}", key, _shown(field, getattr(model.engine, key)), origin)
        for model in settings.models
        for key, field in fields.items()
        if getattr(model.engine, key) != getattr(settings.engine, key)
    ]
    return rows + [("aliases", alias, name, origin) for alias, name in settings.aliases.items()]


def _shown(field: Field, value: object) -> str:
    if (field.setting.is_key or field.type is dict) and value:
        return "(hidden)"
    return field.default_text or "-" if value in (None, "", {}) else field.shown(value)
