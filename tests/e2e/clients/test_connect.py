"""The set-ups that `appliance connect` prints for installed programs, run as printed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.fetched import node_packages
from typer.testing import CliRunner

from appliance.cli import app

pytestmark = pytest.mark.model


def in_node(program: Path) -> list[str]:
    """Link the packages beside a program, where alone Node finds them; return its command."""
    (program.parent / "node_modules").symlink_to(node_packages() / "node_modules")
    return ["node", str(program)]


# A file's name, and the command that runs it.
PROGRAMS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "curl": ("chat.sh", lambda program: ["bash", str(program)]),
    "python": ("chat.py", lambda program: [sys.executable, str(program)]),
    "anthropic": ("chat.py", lambda program: [sys.executable, str(program)]),
    "javascript": ("chat.mjs", in_node),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_gets_an_answer_as_it_is_printed(name: str, url: str, tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["connect", name, "--url", url, "--code"])
    assert printed.exit_code == 0, printed.exception
    file, command = PROGRAMS[name]
    program = tmp_path / file
    program.write_text(printed.stdout)
    ran = subprocess.run(command(program), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert name != "curl" or '"chat.completion"' in ran.stdout
