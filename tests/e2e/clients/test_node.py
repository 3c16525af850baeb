"""The two packages that JavaScript programs use."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.runs.fetched import node_packages

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.model


def run(name: str, base_url: str, folder: Path) -> Any:
    """Return a program's output; it is copied beside the packages, where alone Node finds them."""
    (folder / "node_modules").symlink_to(node_packages() / "node_modules")
    program = shutil.copy(PROGRAMS / name, folder)
    finished = subprocess.run(
        ["node", program, base_url], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_openai_streams_and_calls(base_url: str, tmp_path: Path) -> None:
    said = run("openai.mjs", base_url, tmp_path)
    assert "Tokyo" in said["streamed"]["text"]
    assert said["streamed"]["usage"]["completion_tokens"] > 0
    loop = said["loop"]
    assert (loop["reason"], loop["name"]) == ("tool_calls", "weather")
    assert loop["arguments"].keys() == {"city"}
    assert loop["answer"]


def test_the_ai_sdk_makes_an_object_and_loops_over_a_tool(base_url: str, tmp_path: Path) -> None:
    said = run("ai_sdk.mjs", base_url, tmp_path)
    assert said["object"].keys() == {"city", "rainy"}
    assert (said["steps"], said["reasons"][0]) == (2, "tool-calls")
    assert len(said["asked"]) == 1
    assert said["text"]
