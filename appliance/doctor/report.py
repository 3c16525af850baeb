"""Writes findings as text, as JSON, and as a bug report in Markdown."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from appliance.doctor.finding import Finding, Grade
from appliance.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "nvidia-ml-py")


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
