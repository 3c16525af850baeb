"""Writes the settings' reference page and an example configuration file."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from appliance.config.setting import Field, Group, Unit, fields_of
from appliance.config.sources import SECTIONS

_TITLES = {
    "server": "The server: addresses, keys, requests, log",
    "engine": "The engine: model, memory, computing",
    "top": "The dashboard",
}
_MODELS = (
    "A server of several models has a table for each, with any key of [engine]. Missing keys come"
    " from [engine], and a flag or variable wins over both. Without a key model, NAME is the model."
    " [aliases] gives them further names."
)
_MODELS_EXAMPLE = (
    "#   [models.small]",
    '#   model = "smollm2-135m"',
    "#   [aliases]",
    '#   gpt-4o-mini = "small"',
)


def settings_reference() -> str:
    """Write a Markdown table of settings for each section."""
    parts = [
        "A flag wins over an environment variable, which wins over the configuration file, "
        "`~/.config/appliance/config.toml` or the one that `--config` or "
        "`APPLIANCE_CONFIG` names. Sizes are written like `512MiB` or `2G`, durations like `90s` "
        "or `10m`, switches as `on` or `off`; the flag `--no-NAME` turns a switch off. `auto` "
        "leaves a number to planning or measurement. An unknown key of the file is an error; an "
        "unknown variable is only logged, since another program may read it. Both messages name "
        "the nearest known one."
    ]
    for name, section in SECTIONS.items():
        parts.append(f"## [{name}]\n\n{_TITLES[name]}.")
        rows = ["| key | flag | variable | default | what |", "| --- | --- | --- | --- | --- |"]
        rows += [_row(field) for field in _in_groups(fields_of(section).values())]
        parts.append("\n".join(rows))
    parts.append(f"## [models.NAME] and [aliases]\n\n{_MODELS}")
    return "\n\n".join(parts) + "\n"


def example_config() -> str:
    """Write a configuration file with every setting at its default."""
    lines = [
        "# Settings of appliance: remove the # before those you change.",
        "# If it holds keys, nobody else may read it: chmod 600",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"[{name}]"]
        tables = []
        for field in _in_groups(fields_of(section).values()):
            if field.type is dict:
                tables += ["", f"[{name}.{field.name}]  # {field.setting.help}", '# anna = "..."']
            else:
                comment = f"# {field.setting.help}{_note(field)}"
                lines += wrap(comment, 96, subsequent_indent="# ")
                lines.append(f"# {field.name} = {_toml(field)}")
        lines += tables
    lines += ["", *wrap(f"# {_MODELS}", 96, subsequent_indent="# "), *_MODELS_EXAMPLE]
    return "\n".join(lines) + "\n"


def _in_groups(fields: Iterable[Field]) -> list[Field]:
    order = list(Group)
    return sorted(fields, key=lambda field: order.index(field.setting.group))


def _row(field: Field) -> str:
    is_table = field.type is dict
    cells = (
        f"`{field.name}`",
        f"`{field.flag}`" if field.setting.has_flag else "",
        "" if is_table else f"`{field.variable}`",
        field.default_text,
        field.setting.help + _note(field),
    )
    return "| " + " | ".join(cells) + " |"


def _note(field: Field) -> str:
    """Return the bounds as a sentence, if there are any."""
    if not field.bounds:
        return ""
    unit = " tokens" if field.setting.unit is Unit.TOKENS else ""
    return f" {field.bounds[0].upper()}{field.bounds[1:].removesuffix(unit)}{unit}."


def _toml(field: Field) -> str:
    """Return the default in TOML; "auto" for one that has no value."""
    if field.default is None or field.default == "":
        if field.type is str:
            return '""'
        return '"auto"'
    if isinstance(field.default, bool):
        return "true" if field.default else "false"
    if field.setting.unit in (Unit.BYTES, Unit.SECONDS) or field.type is str:
        return f'"{field.shown(field.default)}"'
    return field.shown(field.default)
