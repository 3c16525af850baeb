"""Describes a setting: its valid values, and messages for invalid ones.

Flags, environment, configuration files and the reference all read these definitions, which annotate
the fields of the structs in `engine`, `server` and `top`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import msgspec

from appliance.config.api_keys import ApiKey
from appliance.config.values import parse_duration, parse_size, show_duration, show_size
from appliance.errors import ConfigError

ENV_PREFIX = "APPLIANCE_"

_SWITCH = {
    **dict.fromkeys(("on", "true", "yes", "1"), True),
    **dict.fromkeys(("off", "false", "no", "0"), False),
}
_TYPES = (bool, int, float, str, dict)
_NUMBERS: dict[type, str] = {int: "a whole number", float: "a number"}


class Group(Enum):
    """Groups of settings in help and reference, in order."""

    ADDRESS = "Address and keys"
    MODEL = "Model"
    KV = "KV cache"
    STEPS = "Context and steps"
    COMPUTE = "Where and how it computes"
    REQUESTS = "Requests"
    LOG = "Log and dashboards"
    TOP = "Dashboard"


class Unit(Enum):
    """Unit of a number; the value is its word."""

    NONE = ""
    BYTES = "bytes"
    SECONDS = "seconds"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's definition, besides name, type and default.

    Attributes:
        help: one sentence.
        choices: all valid values; empty means any.
        named: further choices that end in a name, such as "draft=MODEL".
        default_is: the default in words, if the value does not explain itself.
        is_key: an API key, which messages must not contain.
    """

    help: str
    group: Group
    unit: Unit = Unit.NONE
    low: float | None = None
    high: float | None = None
    choices: tuple[str | int, ...] = ()
    named: tuple[str, ...] = ()
    default_is: str = ""
    has_flag: bool = True
    is_key: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """A setting as a field of its section.

    Attributes:
        name: of the field and of the key in a configuration file.
        type: bool, int, float, str or dict.
    """

    name: str
    type: type
    is_optional: bool
    default: object
    setting: Setting

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def read(self, value: object, origin: str) -> object:
        """Parse a written value: text, or a value from TOML or Python.

        `origin` names the value's source in messages.

        Raises:
            ConfigError: the value has the wrong type or is out of bounds.
        """
        if self.is_optional and (value is None or value == ""):
            return None
        if self.is_optional and self.type is not str and value == "auto":
            return None
        if isinstance(value, str):
            value = self._parse(value.strip(), origin)
        elif self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type or not _holds_text(value):
            raise ConfigError(f"{origin} must be {self.kind}{self._got(value)}")
        self.check(value, origin)
        return value

    def check(self, value: object, origin: str) -> None:
        """Raise ConfigError if a value of the right type is not allowed."""
        setting = self.setting
        if value is None or (self.is_optional and value == ""):
            return
        if setting.is_key and isinstance(value, str):
            ApiKey.parse(value, origin)
        elif setting.choices and value not in setting.choices and not _is_named(value, setting):
            words = ", ".join(map(str, (*setting.choices, *setting.named)))
            raise ConfigError(f"{origin} must be one of {words}{self._got(value)}")
        elif value == "" and self.default != "":
            raise ConfigError(f"{origin} must not be empty")
        elif not _is_within(value, setting.low, setting.high):
            raise ConfigError(f"{origin} must be {self.bounds}{self._got(value)}")

    @property
    def kind(self) -> str:
        """The accepted form of values, in words."""
        if self.setting.unit is Unit.BYTES:
            return "a size such as 512MiB or 2GiB"
        if self.setting.unit is Unit.SECONDS:
            return "a number of seconds, or a duration such as 90s or 10m"
        if self.type is bool:
            return "on or off"
        if self.type is dict:
            return (
                "a table of the configuration file, with lines NAME = KEY; from outside, name a "
                f"file with such lines in {ENV_PREFIX}API_KEY_FILE"
            )
        return _NUMBERS.get(self.type, "text")

    @property
    def bounds(self) -> str:
        """The bounds in words; empty if there are none."""
        setting = self.setting
        if setting.low is None or setting.high is None:
            return ""
        unit = "" if setting.unit in (Unit.BYTES, Unit.SECONDS) else f" {setting.unit.value}"
        low, high = (self.shown(bound) for bound in (setting.low, setting.high))
        return f"between {low} and {high}{unit}".rstrip()

    @property
    def default_text(self) -> str:
        if self.setting.default_is:
            return self.setting.default_is
        return self.shown(self.default) if self.default not in (None, "", {}) else ""

    def as_text(self, value: object) -> str:
        """Write a value for an environment variable."""
        return ("on" if value else "off") if isinstance(value, bool) else str(value)

    def shown(self, value: object) -> str:
        """Format a value for messages and the reference."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, int | float):
            if self.setting.unit is Unit.BYTES:
                return show_size(value)
            if self.setting.unit is Unit.SECONDS:
                return show_duration(value)
            return str(value) if isinstance(value, int) else f"{value:g}"
        return str(value)

    def _parse(self, text: str, origin: str) -> object:
        word = text.lower()
        try:
            if self.type is bool:
                return _SWITCH.get(word, text)
            if self.type is int and self.setting.unit is Unit.BYTES:
                return parse_size(text)
            if self.type is int:
                return int(text)
            if self.type is float and self.setting.unit is Unit.SECONDS and word[-1:].isalpha():
                return parse_duration(text)
            if self.type is float:
                return float(text)
        except (ConfigError, ValueError):
            raise ConfigError(f"{origin} must be {self.kind}{self._got(text)}") from None
        return text

    def _got(self, value: object) -> str:
        if self.setting.is_key or self.type is dict:
            return ""  # it may hold a key
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"; got {self.shown(value) if is_number else repr(value)}"


@lru_cache
def fields_of(section: type[msgspec.Struct]) -> Mapping[str, Field]:
    """Return a section's settings by name, in order."""
    return {info.name: _field(info) for info in msgspec.structs.fields(section)}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_all(section: msgspec.Struct) -> None:
    """Raise ConfigError if a setting of a section is out of bounds."""
    for name, field in fields_of(type(section)).items():
        field.check(getattr(section, name), name)


def nearest(word: str, words: Iterable[str]) -> str:
    """Suggest the known word nearest to an unknown one, or list all."""
    known = list(words)
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known: {', '.join(known)}"


def _field(info: Any) -> Field:
    annotated, setting = get_args(info.type)[:2]
    assert get_origin(info.type) is Annotated, info.name
    kinds = get_args(annotated) if isinstance(annotated, UnionType) else (annotated,)
    kind = next(one for one in kinds if one is not NoneType)
    of = get_origin(kind) or kind
    assert of in _TYPES, (
        f"{info.name}: a setting is bool, int, float, str or a table; choices and lists are text"
    )
    default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
    return Field(info.name, of, NoneType in kinds, default, setting)


def _holds_text(value: object) -> bool:
    """Return True unless a table holds a value other than text."""
    return not isinstance(value, dict) or all(isinstance(one, str) for one in value.values())


def _is_named(value: object, setting: Setting) -> bool:
    """Return True for a choice that ends in a name, with a name."""
    starts = [one[: one.index("=") + 1] for one in setting.named]
    return isinstance(value, str) and any(
        value.startswith(start) and value != start for start in starts
    )


def _is_within(value: object, low: float | None, high: float | None) -> bool:
    if low is None or high is None:
        return True
    return isinstance(value, int | float) and low <= value <= high  # false for nan
