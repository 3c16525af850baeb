"""What `appliance connect` prints for programs that are here, run as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app

pytestmark = pytest.mark.model


def code_for(name: str, url: str) -> str:
    result = CliRunner().invoke(app, ["connect", name, "--url", url])
    assert result.exit_code == 0, result.exception
    return result.stdout


def test_curl_gets_an_answer(url: str) -> None:
    command = code_for("curl", url).partition("\n\n")[2]
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert '"chat.completion"' in ran.stdout


@pytest.mark.parametrize("name", ["python", "anthropic"])
def test_a_program_gets_an_answer(name: str, url: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code_for(name, url).partition("Then:\n")[2])
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
