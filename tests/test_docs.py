"""The documentation is true as far as a test can check: links, commands, code, generated tables."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from appliance.cli import app
from appliance.config import load_settings
from appliance.docs import FOLDER, NAMES, read
from bench.docs.tables import stale_pages

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(FOLDER.glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)]+)\)")
MODULE = re.compile(r"`([\w./-]+\.py)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return path.name


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for language, code in BLOCK.findall(path.read_text()):
            if language in languages:
                yield path.name, code


def command_lines() -> list[tuple[str, str]]:
    """Every line of a page that starts one of our commands or a script."""
    found = []
    for name, code in blocks("", "bash", "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = [word for word in line.split() if "=" not in word.split("$")[0]]
            if words and re.fullmatch(r"(\.venv/bin/)?appliance|scripts/\w+", words[0]):
                found.append((name, line))
    return found


@cache
def modules() -> tuple[str, ...]:
    """Every Python file of the project, relative to its root."""
    folders = ("appliance", "kernels", "quant", "tui", "tests", "scripts")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(str(path.relative_to(ROOT)) for path in found)


def headings(page: str) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_all_pages_are_listed_and_nothing_else() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in FOLDER.glob("*.md"))
    assert all(read(name).title for name in NAMES)


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        name, _, heading = target.partition("#")
        if "://" not in target:
            assert (path.parent / name).exists(), target
        if heading and name.endswith(".md"):
            assert heading in headings((path.parent / name).read_text()), target


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_modules_that_a_page_names_are_there(path: Path) -> None:
    for name in MODULE.findall(path.read_text()):
        assert any(f"/{module}".endswith(f"/{name}") for module in modules()), name


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_commands_exist_with_their_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[next(i for i, word in enumerate(words) if re.search(r"appliance$|/", word)) :]
    if words[0].startswith("scripts/"):
        assert (ROOT / words[0]).exists()
        return
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", ()):
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{page}: {line}"


@pytest.mark.parametrize(("page", "code"), list(blocks("python")))
def test_python_is_python(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "appliance":
            import appliance

            for alias in node.names:
                assert hasattr(appliance, alias.name), alias.name


@pytest.mark.parametrize(("page", "code"), list(blocks("toml")))
def test_configuration_is_accepted(page: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"  # without the file of keys, which the reader provides
    path.write_text("\n".join(line for line in code.splitlines() if "api_key_file" not in line))
    load_settings({}, path)


def test_bodies_of_requests_are_json() -> None:
    bodies = re.findall(r"-d '(.*?)'", (ROOT / "README.md").read_text(), re.DOTALL)
    assert bodies
    for body in bodies:
        assert json.loads(body)["messages"]


def test_generated_tables_are_up_to_date() -> None:
    assert [path.name for path in stale_pages()] == []


def test_a_topic_is_found_by_its_first_letters(capsys: pytest.CaptureFixture[str]) -> None:
    from appliance.commands.docs import docs
    from appliance.errors import ConfigError

    docs("mem")
    assert capsys.readouterr().out == read("memory-and-cache").text
    several, none = "is one of adapters, api, architecture", "is none of the topics"
    for word, says in (("a", several), ("x", none)):
        with pytest.raises(ConfigError, match=says):
            docs(word)
    docs()
    assert all(name in capsys.readouterr().out for name in NAMES[:1])
