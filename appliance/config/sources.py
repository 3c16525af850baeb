"""Merges flags over environment over configuration file over defaults, tracking origins.

A file may have a table [models.NAME] for each of several models, and aliases.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from appliance.config.api_keys import check_private
from appliance.config.engine import EngineConfig
from appliance.config.environment import (
    OTHER_VARIABLES,
    config_path,
    is_credential,
    kv_dir,
    packed_dir,
)
from appliance.config.server import ServerConfig, known_keys
from appliance.config.setting import ENV_PREFIX, fields_of, flag_of, nearest
from appliance.config.top import TopConfig
from appliance.errors import ConfigError

logger = logging.getLogger(__name__)

AnySection = TypeVar("AnySection", bound=msgspec.Struct)
Given = Mapping[str, object]

SECTIONS: dict[str, type[EngineConfig] | type[ServerConfig] | type[TopConfig]] = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "top": TopConfig,
}
MODELS, ALIASES = "models", "aliases"  # tables of the file beside its sections
_NAME = re.compile(r"\w[\w./:@+-]{0,127}")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A served model and its settings.

    Attributes:
        name: id in the API; None for the model's own.
    """

    engine: EngineConfig
    name: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server.

    Attributes:
        engine: for the model, if no table describes one.
        models: of the file's tables; the first is loaded first.
        aliases: model name by alias.
    """

    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    models: tuple[ModelConfig, ...] = ()
    aliases: dict[str, str] = {}

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """Models to serve, at least one."""
        plain = ModelConfig(engine=self.engine, name=self.server.served_model_name)
        return self.models or (plain,)

    def with_engines(self, change: Callable[[EngineConfig], EngineConfig]) -> Settings:
        """Return settings with every model's settings changed."""
        models = tuple(
            msgspec.structs.replace(one, engine=change(one.engine)) for one in self.models
        )
        return msgspec.structs.replace(self, engine=change(self.engine), models=models)


@dataclass(frozen=True, slots=True)
class WrittenSetting:
    """A setting as a user wrote it.

    Attributes:
        value: text, or a value from TOML or Python; not checked yet.
        origin: the flag, variable, or file and key, for messages.
    """

    value: object
    origin: str


def load_settings(flags: Given, path: Path | None = None) -> Settings:
    """Load the settings of a server.

    Args:
        flags: value by setting; None if the flag was not given.
        path: configuration file; None for the usual place, if there is one.

    Raises:
        ConfigError: an unknown key, a wrong type or an invalid value; the message names the flag,
            variable or key, and the nearest valid key.
    """
    mine = fields_of(EngineConfig).keys()
    engine = {name: value for name, value in flags.items() if name in mine}
    server = {name: value for name, value in flags.items() if name not in mine}
    settings = Settings(
        engine=load_section(EngineConfig, engine, path),
        server=load_section(ServerConfig, server, path),
        **_load_models(engine, path),
    )
    known_keys(settings.server)  # find a bad key file before anything is loaded
    if settings.models and settings.server.served_model_name is not None:
        raise ConfigError(
            "served_model_name names one model; tables [models.NAME] name theirs themselves"
        )
    return settings


def _load_models(given: Given, path: Path | None) -> dict[str, Any]:
    """Return the fields of `Settings` about several models.

    A model named by flag or variable is loaded first, or served alone if no table has its name.
    """
    file = config_path(path)
    parsed = {} if file is None else _parse(file)[0]
    if file is None or not (parsed.get(MODELS) or parsed.get(ALIASES)):
        return {}
    aliases = _alias_table(file, parsed)
    asked = written_settings(EngineConfig, given, path).get("model")
    first = "" if asked is None else str(asked.value)
    first = aliases.get(first, first)
    models = []
    for name, table in _model_tables(file, parsed).items():
        place = f"{file}: {MODELS}.{name}"
        written = written_settings(
            EngineConfig, {**given, "model": None}, path, table=(place, table)
        )
        model = str(table.get("model") or name)
        written["model"] = WrittenSetting(model, f"{place}.model")
        models.append(ModelConfig(engine=_built(EngineConfig, written), name=name))
    names = [one.name or "" for one in models]
    if not models:
        return {"aliases": aliases}
    check_names(names, aliases)
    if first and first not in names:
        if asked is not None and asked.origin.startswith(str(file)):
            raise ConfigError(f"{asked.origin} names a model beside [{MODELS}]; give it a table")
        logger.info("%s has no table in %s and is served alone", first, file)
        return {}
    models.sort(key=lambda one: one.name != first)
    return {"models": tuple(models), "aliases": aliases}


def _model_tables(path: Path, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of each model's table, or raise ConfigError for an invalid one."""
    models = tables.get(MODELS, {})
    fields = fields_of(EngineConfig)
    if not isinstance(models, dict):
        raise ConfigError(f"{path}: {MODELS} must be tables: [{MODELS}.NAME]")
    for name, table in models.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {MODELS}.{name} must be a table: [{MODELS}.{name}], with a line"
                f" model = {table!r}"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: [{MODELS}.{name!r}]: a name has letters, digits and . / : @ + - inside,"
                " at most 128"
            )
        for key in table:
            if key not in fields:
                raise ConfigError(
                    f"{path}: unknown key {key!r} in [{MODELS}.{name}]{nearest(key, fields)}"
                )
    return models


def _alias_table(path: Path, tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the model name of each alias, or raise ConfigError for an invalid table."""
    aliases = tables.get(ALIASES, {})
    if not isinstance(aliases, dict):
        raise ConfigError(f"{path}: {ALIASES} must be a table: [{ALIASES}]")
    for alias, name in aliases.items():
        if not isinstance(name, str) or not _NAME.fullmatch(alias):
            raise ConfigError(f'{path}: {ALIASES}.{alias} must be a line ALIAS = "NAME"')
    return aliases


def check_names(names: Iterable[str], aliases: Mapping[str, str]) -> None:
    """Check that each name means one model.

    Args:
        aliases: model id by alias.

    Raises:
        ConfigError: two models share a name, or an alias is a model's name or names none.
    """
    known = list(names)
    lower = [name.lower() for name in known]
    for name in known:
        if lower.count(name.lower()) > 1:
            raise ConfigError(f"two models have the name {name!r}; give each its own")
    for alias, name in aliases.items():
        if name not in known:
            raise ConfigError(
                f"{ALIASES}.{alias} names {name!r}, which is no model{nearest(name, known)}"
            )
        if alias.lower() in lower:
            raise ConfigError(f"{ALIASES}.{alias} is the name of a model; choose another")


def load_section(
    section: type[AnySection],
    given: Given,
    path: Path | None = None,
    *,
    spell: Callable[[str], str] = flag_of,
) -> AnySection:
    """Load the settings of one section, ignoring values of others.

    Args:
        given: value by setting, over everything else; None if not given.
        path: configuration file, see `load_settings`.
        spell: names a given setting in messages; by default its flag.

    Raises:
        ConfigError: see `load_settings`.
    """
    return _built(section, written_settings(section, given, path, spell=spell))


def _built(section: type[AnySection], written: Mapping[str, WrittenSetting]) -> AnySection:
    fields = fields_of(section)
    values = {name: fields[name].read(one.value, one.origin) for name, one in written.items()}
    try:
        return section(**values)
    except ConfigError as error:  # two settings contradict each other
        origins = {name: one.origin for name, one in written.items()}
        words = re.sub(r"\b\w++(?= \()", lambda word: origins.get(word[0], word[0]), str(error))
        raise ConfigError(words) from None


def written_settings(
    section: type[msgspec.Struct],
    given: Given,
    path: Path | None = None,
    *,
    spell: Callable[[str], str] = flag_of,
    table: tuple[str, Given] = ("", {}),
) -> dict[str, WrittenSetting]:
    """Collect a section's written settings by name; arguments as for `load_section`.

    Args:
        table: place and keys of a further table of the file, over the section's own.

    Raises:
        ConfigError: a key is unknown; values are not checked.
    """
    fields = fields_of(section)
    written: dict[str, WrittenSetting] = {}
    file = config_path(path)
    for name, value in _section_of(file, section).items():
        written[name] = WrittenSetting(value, f"{file}: {name}")
    for name, value in table[1].items():
        written[name] = WrittenSetting(value, f"{table[0]}.{name}")
    for name, field in fields.items():
        if text := os.environ.get(field.variable):
            written[name] = WrittenSetting(text, field.variable)
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(f"{spell(name)} is not a setting{nearest(name, fields)}")
        if value is not None:
            written[name] = WrittenSetting(value, spell(name))
    return written


def with_cache_folders(settings: Settings) -> Settings:
    """Set a server's folders of KV cache and packed weights, unless the settings choose others."""
    usual = {"kv_disk": kv_dir, "packed_weights": packed_dir}

    def placed(engine: EngineConfig) -> EngineConfig:
        unset = [name for name in usual if getattr(engine, name) == "auto"]
        return msgspec.structs.replace(engine, **{name: str(usual[name]()) for name in unset})

    return settings.with_engines(placed)


def warn_of_unknown_variables() -> None:
    """Log a warning for each unknown environment variable that looks like a setting.

    It is no error: the variable may be for another version or for a program around this one.
    """
    for message in unknown_variables():
        logger.warning("%s", message)


def unknown_variables() -> Iterator[str]:
    """Describe each unknown environment variable that looks like a setting."""
    known = {field.variable for one in SECTIONS.values() for field in fields_of(one).values()}
    names = [variable.removeprefix(ENV_PREFIX) for variable in sorted(known | OTHER_VARIABLES)]
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {ENV_PREFIX}{close[0]}?" if close else ""
            yield f"environment variable {variable} is no setting and changes nothing{hint}"


def _section_of(path: Path | None, section: type[msgspec.Struct]) -> dict[str, Any]:
    """Read a section of a configuration file, checking keys of other sections too."""
    if path is None:
        return {}
    tables, mode = _parse(path)
    for name, table in tables.items():
        if name in (MODELS, ALIASES):
            continue
        if name not in SECTIONS:
            homes = [one for one in SECTIONS if name in fields_of(SECTIONS[one])]
            if homes and not isinstance(table, dict):
                raise ConfigError(f"{path}: {name} belongs under [{' or ['.join(homes)}]")
            known = [*SECTIONS, MODELS, ALIASES]
            raise ConfigError(f"{path}: unknown section [{name}]{nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a section: [{name}]")
        fields = fields_of(SECTIONS[name])
        for key in table:
            if key not in fields:
                raise ConfigError(f"{path}: unknown key {key!r} in [{name}]{nearest(key, fields)}")
    _model_tables(path, tables)
    _alias_table(path, tables)
    found: dict[str, Any] = tables.get(_name_of(section), {})
    if (found.get("api_key") or found.get("api_keys")) and not is_credential(path):
        check_private(path, mode)
    return found


def _parse(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's tables and mode."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _name_of(section: type[msgspec.Struct]) -> str:
    return next(name for name, one in SECTIONS.items() if one is section)
