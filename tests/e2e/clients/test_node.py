"""The two packages that JavaScript programs use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clients.conftest import output_of_node

pytestmark = pytest.mark.model


def test_openai_streams_and_calls(base_url: str, tmp_path: Path) -> None:
    said = output_of_node("openai.mjs", tmp_path, base_url)
    assert "Tokyo" in said["streamed"]["text"]
    assert said["streamed"]["usage"]["completion_tokens"] > 0
    loop = said["loop"]
    assert (loop["reason"], loop["name"]) == ("tool_calls", "weather")
    assert loop["arguments"].keys() == {"city"}
    assert loop["answer"]


def test_the_ai_sdk_makes_an_object_and_loops_over_a_tool(base_url: str, tmp_path: Path) -> None:
    said = output_of_node("ai_sdk.mjs", tmp_path, base_url)
    assert said["object"].keys() == {"city", "rainy"}
    assert (said["steps"], said["reasons"][0]) == (2, "tool-calls")
    assert len(said["asked"]) == 1
    assert said["text"]
