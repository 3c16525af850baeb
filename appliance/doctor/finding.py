"""The input and the result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from appliance.config import EngineConfig, ServerConfig, TopConfig

if TYPE_CHECKING:
    from appliance.hub import ResolvedModel

MIB, GIB = 2**20, 2**30


class Grade(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        name: what was checked, in a word or two.
        found: in words; never an API key.
    """

    name: str
    grade: Grade
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Scope:
    """The machine, settings, model and server to check.

    Attributes:
        engine: settings; defaults if the real ones are unreadable.
        server: likewise.
        top: likewise.
        config: configuration file that a flag names.
        url: of a server that a flag names.
        model: on this machine; None if it is not here.
        model_problem: why the model's name is invalid.
        runs_model: run the model in this process if no server answers.
        is_quick: skip checks that take more than a few seconds.
        root: of the system's own files.
        nvml: replaces pynvml.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    top: TopConfig = field(default_factory=TopConfig)
    config: Path | None = None
    url: str | None = None
    model: ResolvedModel | None = None
    model_problem: str | None = None
    runs_model: bool = False
    is_quick: bool = False
    root: Path = Path("/")
    nvml: Any = None


class Check(Protocol):
    """A check of one kind of thing; it changes nothing."""

    def __call__(self, scope: Scope) -> Iterable[Finding]: ...


def show_gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"
