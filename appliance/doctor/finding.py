"""The input and the result of a check, and results as text, as JSON and as a bug report."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from appliance.config import EngineConfig, ServerConfig, TopConfig
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.hub import ResolvedModel

MIB, GIB = 2**20, 2**30
_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "nvidia-ml-py")


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


def as_line(finding: Finding) -> str:
    """Format a finding, with its fix on a second line."""
    line = f"{finding.grade.value:<8} {finding.name:<16} {finding.found}"
    return f"{line}\n{'':<26}fix: {finding.fix}" if finding.fix else line


def summary(findings: Iterable[Finding]) -> str:
    """Count the findings by grade."""
    counts = Counter(finding.grade for finding in findings)
    return ", ".join(f"{counts[grade]} {grade.value}" for grade in Grade if counts[grade])


def as_json(findings: Sequence[Finding]) -> str:
    rows = [
        {"name": one.name, "status": one.grade.value, "found": one.found, "fix": one.fix}
        for one in findings
    ]
    return json.dumps({"version": __version__, "findings": rows}, indent=2, ensure_ascii=False)


def as_markdown(findings: Sequence[Finding]) -> str:
    """Format a bug report for the user to complete; nothing is redacted yet."""
    software = [("appliance", __version__), ("Python", platform.python_version())]
    software += [(name, _version_of(name)) for name in _PACKAGES]
    software.append(("system", f"{platform.system()} {platform.release()} {platform.machine()}"))
    parts = [
        "## What happened\n\n<!-- What did you do, what did you expect, what came instead? -->",
        "## Versions\n\n" + "\n".join(f"- {name}: {found}" for name, found in software),
        f"## Findings: {summary(findings)}",
        "| status | what | found | fix |\n| --- | --- | --- | --- |\n"
        + "\n".join(_row(finding) for finding in findings),
    ]
    return "\n\n".join(parts)


def _row(finding: Finding) -> str:
    cells = (finding.grade.value, finding.name, finding.found, finding.fix)
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
