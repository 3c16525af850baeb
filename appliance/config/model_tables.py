"""The models of a configuration file: a table [models.NAME] for each, and aliases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.config.sections import EngineConfig
from appliance.config.server_section import ServerConfig
from appliance.config.setting import fields_of, nearest
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

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


def model_tables(path: Path, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
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


def alias_table(path: Path, tables: Mapping[str, Any]) -> dict[str, str]:
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
