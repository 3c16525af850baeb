"""The `llm` program: a prompt, and one with a schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.connect import RECIPES, Connection

pytestmark = pytest.mark.model


@pytest.fixture
def folder(tmp_path: Path, url: str) -> Path:
    """Its settings, as printed by `appliance connect llm`."""
    step, *_ = RECIPES["llm"].steps(Connection(url, "small"))
    (tmp_path / step.file).write_text(step.code)
    return tmp_path


def llm(folder: Path, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "home", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_prompt_is_answered(folder: Path) -> None:
    said = llm(folder, "-o", "temperature", "0", "What is the capital of Japan?")
    assert "Tokyo" in said


def test_a_schema_is_obeyed_in_a_stream(folder: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        },
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    said = json.loads(llm(folder, "--schema", json.dumps(schema), "A dog"))
    assert said.keys() == {"name", "legs"}
    assert 0 <= said["legs"] <= 8
