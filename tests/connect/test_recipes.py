"""Every set-up is well-formed in its language and holds the values, whatever these are."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from appliance.connect import RECIPES, Connection, SetupStep

PLAIN = Connection("http://127.0.0.1:8080", "SmolLM2-135M-Instruct")
HOSTILE = Connection(
    "https://[fd00::1]:8443", 'org/mod\'el "7" $(id) größe\\n', "k'e\"y $HOME `id` \\x", 4096
)
ASKS_FOR_MODELS = {"open-webui"}  # the server itself, so the set-up names no model
CASES = [(name, one) for name in RECIPES for one in (PLAIN, HOSTILE)]


def strings(value: Any) -> Iterator[str]:
    """All texts in a parsed value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def of_python(code: str) -> Iterator[str]:
    return (
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def of_bash(code: str) -> Iterator[str]:
    """The program's arguments and environment; the program itself is not started."""
    words = shlex.split(code.replace("\\\n", " "))
    name = next(word for word in words if not re.match(r"\w+=", word))
    stub = f'{name}() {{ printf "%s\\0" "$@"; env -0; }}\n'
    ran = subprocess.run(
        ["bash", "-euc", stub + code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    return iter(ran.stdout.split("\0"))


def of_javascript(code: str) -> Iterator[str]:
    """The literals, which are JSON here; Node checks the rest, if it is installed."""
    if (node := shutil.which("node")) is not None:
        command = [node, "--check", "--input-type=module", "-"]
        subprocess.run(command, input=code, text=True, check=True)
    decoder = json.JSONDecoder()
    at = 0
    while (at := code.find('"', at)) >= 0:
        text, at = decoder.raw_decode(code, at)
        yield text


PARSERS: dict[str, Callable[[str], Iterator[str]]] = {
    "json": lambda code: strings(json.loads(code)),
    "yaml": lambda code: strings(yaml.safe_load(code)),
    "toml": lambda code: strings(tomllib.loads(code)),
    "python": of_python,
    "bash": of_bash,
    "javascript": of_javascript,
}


def texts(steps: tuple[SetupStep, ...]) -> list[str]:
    found = [step.text for step in steps if not step.code]
    for step in steps:
        if step.code:
            found += PARSERS[step.language](step.code)
    return found


@pytest.mark.parametrize(("name", "to"), CASES)
def test_the_values_arrive_as_they_are(name: str, to: Connection) -> None:
    found = texts(RECIPES[name].steps(to))
    models = [] if name in ASKS_FOR_MODELS else [to.model]
    for value in (to.url, *models, *([to.key] if to.key else [])):
        inner = json.dumps(value, ensure_ascii=False)[1:-1]  # a JSON body inside of an argument
        assert any(value in text or inner in text for text in found), value


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_says_where_its_code_goes(name: str) -> None:
    for step in RECIPES[name].steps(PLAIN):
        assert step.text
        assert bool(step.code) == bool(step.language)
        if step.language in ("json", "yaml", "toml"):
            assert Path(step.file).name in step.text


@pytest.mark.parametrize("name", RECIPES)
def test_the_code_is_for_the_file_if_there_is_one(name: str) -> None:
    steps = RECIPES[name].steps(PLAIN)
    code = RECIPES[name].code(PLAIN)
    for step in steps:
        if step.file:
            assert code == step.code
            break
    assert "install" not in code.split("\n")[0], "that is done once, by hand"
    assert bool(code) == any(step.code for step in steps)


def test_limits_are_the_servers() -> None:
    (step,) = RECIPES["opencode"].steps(HOSTILE)
    (limits,) = json.loads(step.code)["provider"]["home"]["models"].values()
    assert limits["limit"] == {"context": 4096, "output": 1024}
    toml = tomllib.loads(RECIPES["codex"].steps(HOSTILE)[0].code)
    assert toml["model_context_window"] == 4096
    assert "limit" not in RECIPES["opencode"].steps(PLAIN)[0].code


@pytest.mark.parametrize("name", ["curl", "python", "javascript", "anthropic"])
def test_a_program_limits_its_answer(name: str) -> None:
    """SmolLM2 once answered a printed greeting with 7,458 tokens."""
    assert re.search(r'max_(completion_)?tokens"?[:=] ?1000\b', RECIPES[name].code(PLAIN))


def test_litellms_proxy_gets_a_key() -> None:
    """LiteLLM 1.108's proxy ends at once without `general_settings.master_key`."""
    (settings, *_) = RECIPES["litellm"].steps(PLAIN)
    key = yaml.safe_load(settings.code)["general_settings"]["master_key"]
    assert re.fullmatch(r"sk-[0-9a-f]{32}", key), "its keys begin so"
