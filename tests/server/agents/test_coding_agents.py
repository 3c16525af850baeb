"""Coding agents that really edit a file, and instructor's third way of asking.

The server, its protocols, the chat template, the parsing of calls, the agent, its tools and the
file are real. No model so small could do this, so the test writes down what the engine says.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.runs.fetched import agent, python_clients
from support.runs.waiting import LIMIT, until

from appliance.connect import RECIPES, Connection
from tests.server.agents.conftest import Play, Rules, call

OUTCOME = "the number is 42"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a file that contains a wrong number."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "number.txt").write_text("the number is 17\n")
    return folder


async def run(command: Sequence[str | Path], folder: Path, home: Path, **environment: str) -> str:
    """Return an agent's output; it learns nothing of the user who runs the tests."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(2 * LIMIT):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        said, _ = await process.communicate()
        pytest.fail(said.decode())
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_codex_edits_a_file(play: Play, project: Path, home: Path) -> None:
    codex = agent("codex")
    edit = "sed -i s/17/42/ number.txt && echo edited: && cat number.txt"
    rules: Rules = [
        {"contains": [f"edited:\\n{OUTCOME}"], "says": "It is 42 now."},
        {"contains": [f"edited:\n{OUTCOME}"], "says": "It is 42 now."},
        {"contains": ["Mend the number"], "says": call("exec_command", cmd=edit)},
    ]
    async with play(rules) as running:
        step, *_ = RECIPES["codex"].steps(Connection(running.url, "echo"))
        (home / "config.toml").write_text(step.code)
        said = await run(
            [
                codex, "exec", "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "Mend the number",
            ],
            project, home, CODEX_HOME=str(home),
        )  # fmt: skip
        assert "It is 42 now." in said
        await until(running.idle)
    assert (project / "number.txt").read_text() == f"{OUTCOME}\n"


async def test_opencode_reads_and_edits_a_file(play: Play, project: Path, home: Path) -> None:
    opencode = agent("opencode")
    path = str(project / "number.txt")
    rules: Rules = [
        {"contains": ["Mend the number", "Edit applied successfully"], "says": "It is 42 now."},
        {
            "contains": ["Mend the number", "the number is 17"],
            "says": call("edit", filePath=path, oldString="17", newString="42"),
        },
        {"contains": ["Mend the number", '"edit"'], "says": call("read", filePath=path)},
        {"says": "A number"},  # the agent also asks for a title
    ]
    async with play(rules) as running:
        (step,) = RECIPES["opencode"].steps(Connection(running.url, "echo"))
        alone = {"permission": "allow", "autoupdate": False, "share": "disabled"}
        (project / step.file).write_text(json.dumps(json.loads(step.code) | alone))
        said = await run([opencode, "run", "Mend the number"], project, home)
        assert "It is 42 now." in said
        await until(running.idle)
    assert (project / "number.txt").read_text() == f"{OUTCOME}\n"


async def test_claude_code_edits_a_file(play: Play, project: Path, home: Path) -> None:
    edit = "sed -i s/17/42/ number.txt && echo edited: && cat number.txt"
    rules: Rules = [
        {"contains": [f"edited:\\n{OUTCOME}"], "says": "It is 42 now."},
        {"contains": [f"edited:\n{OUTCOME}"], "says": "It is 42 now."},
        {
            "contains": ["Mend the number", "Bash"],
            "says": call("Bash", command=edit, description="Mends the number"),
        },
        {"says": "A number"},  # the agent may ask for a title
    ]
    claude = agent("claude")
    async with play(rules) as running:
        (step,) = RECIPES["claude-code"].steps(Connection(running.url, "echo"))
        *words, _ = shlex.split(step.code.replace("\\\n", " "))
        quiet = {"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        said = await run(
            [claude, "-p", "Mend the number", "--allowedTools", "Bash"],
            project,
            home,
            **quiet,
            **dict(word.split("=", 1) for word in words),
        )
        assert "It is 42 now." in said
        await until(running.idle)
    assert (project / "number.txt").read_text() == f"{OUTCOME}\n"


def _continue(to: Connection, home: Path) -> tuple[list[str | Path], dict[str, str]]:
    (step, *_) = RECIPES["continue"].steps(to)
    config = home / "config.yaml"
    config.write_text(step.code)
    return [agent("cn"), "--config", config, "--auto", "-p", "Mend the number"], {}


def _qwen(to: Connection, home: Path) -> tuple[list[str | Path], dict[str, str]]:
    environment = {
        "OPENAI_BASE_URL": to.api,
        "OPENAI_API_KEY": to.key_to_send,
        "OPENAI_MODEL": to.model,
    }
    return [agent("qwen"), "--auth-type", "openai", "-y", "-p", "Mend the number"], environment


def _pi(to: Connection, home: Path, protocol: str) -> tuple[list[str | Path], dict[str, str]]:
    model = {
        "id": to.model, "name": to.model, "reasoning": True, "input": ["text"],
        "contextWindow": 100_000, "maxTokens": 4000,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    }  # fmt: skip
    provider = {
        "baseUrl": to.url if protocol.startswith("anthropic") else to.api,
        "api": protocol,
        "apiKey": to.key_to_send,
        "models": [model],
    }
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"home": provider}}))
    return [agent("pi"), "--provider", "home", "--model", to.model, "-p", "Mend the number"], {}


def _copilot(
    to: Connection, home: Path, kind: str = "openai", protocol: str = "completions"
) -> tuple[list[str | Path], dict[str, str]]:
    environment = {
        "COPILOT_OFFLINE": "true",
        "COPILOT_PROVIDER_TYPE": kind,
        "COPILOT_PROVIDER_BASE_URL": to.url if kind == "anthropic" else to.api,
        "COPILOT_PROVIDER_WIRE_API": protocol,
        "COPILOT_MODEL": to.model,
    }
    return [agent("copilot"), "-p", "Mend the number", "--allow-all-tools"], environment


@pytest.mark.parametrize(
    ("start", "tool"),
    [
        (_copilot, "bash"),
        (partial(_copilot, protocol="responses"), "bash"),
        (partial(_copilot, kind="anthropic"), "bash"),
        (_continue, "Bash"),
        (_qwen, "run_shell_command"),
        (partial(_pi, protocol="openai-completions"), "bash"),
        (partial(_pi, protocol="openai-responses"), "bash"),
        (partial(_pi, protocol="anthropic-messages"), "bash"),
    ],
)
async def test_an_agent_edits_a_file_by_its_shell(
    play: Play, project: Path, home: Path, start: Callable[..., Any], tool: str
) -> None:
    edit = "sed -i s/17/42/ number.txt && echo edited: $(cat number.txt)"
    arguments: dict[str, Any] = {"command": edit, "description": "Mends the number"}
    if tool == "run_shell_command":
        arguments |= {"is_background": False}
    rules: Rules = [
        {"contains": [f"edited: {OUTCOME}"], "says": "It is 42 now."},
        {"contains": ["Mend the number", f'"{tool}"'], "says": call(tool, **arguments)},
    ]
    async with play(rules) as running:
        command, environment = start(Connection(running.url, "echo"), home)
        said = await run(command, project, home, **environment)
        assert "It is 42 now." in said
        await until(running.idle)
    assert (project / "number.txt").read_text() == f"{OUTCOME}\n"


@pytest.mark.model  # folders that were fetched like this
async def test_instructor_reads_json_that_only_the_prompt_describes(
    play: Play, tmp_path: Path, home: Path
) -> None:
    python = await asyncio.to_thread(python_clients)
    clients = Path(__file__).parents[2] / "e2e" / "clients" / "programs"
    program = shutil.copy(clients / "instructor_modes.py", tmp_path)
    place = {"city": "Paris", "inhabitants": 2_100_000}
    rules: Rules = [{"contains": ["inhabitants", "Eiffel"], "says": json.dumps(place)}]
    async with play(rules) as running:
        said = await run(
            [python / "python", program, f"{running.url}/v1", "JSON", "MD_JSON"],
            tmp_path,
            home,
        )
    for answer in json.loads(said).values():
        assert answer == {"given": place, "reason": "stop"}
