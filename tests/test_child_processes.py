"""What the processes that we start may import, and what their environment holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.engine.process.child import EngineProcess
from appliance.runtime import SECRETS, child_environment

ROOT = Path(__file__).parent.parent
FOLDERS = ("appliance", "kernels", "quant", "tui")
# These start compilers and their tools, with all variables that such programs read.
COMPILERS = {"kernels/cpu/build.py"}


def trees_with(word: str) -> dict[str, ast.Module]:
    """Every file of ours that contains the word, by its path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(text)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.parent.is_symlink() and not any(p.is_symlink() for p in path.parents)
        if word in (text := path.read_text())
    }


def test_no_interpreter_imports_from_the_current_folder() -> None:
    """`python -m` puts that folder first, so that a json.py in it would replace Python's."""
    found = 0
    for place, tree in trees_with("executable").items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.List | ast.Tuple) or len(node.elts) < 2:
                continue
            first, second = node.elts[:2]
            if ast.unparse(first) == "sys.executable":
                found += 1
                assert ast.unparse(second) in ("'-P'", "'-I'"), f"{place}:{node.lineno}"
    assert found >= 6


def test_every_child_gets_an_environment_that_was_made_for_it() -> None:
    found = 0
    for place, tree in trees_with("subprocess").items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or place in COMPILERS:
                continue
            if ast.unparse(node.func) in (
                "subprocess.run",
                "subprocess.Popen",
                "asyncio.create_subprocess_exec",
            ):
                found += 1
                given = {keyword.arg for keyword in node.keywords}
                assert "env" in given, f"{place}:{node.lineno}"
    assert found >= 5


def test_children_do_not_know_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a-key-of-somebody")
    monkeypatch.setenv("HARMLESS", "1")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    told = json.loads(
        subprocess.check_output([sys.executable, "-c", code], env=child_environment(MORE="2"))
    )
    assert "a-key-of-somebody" not in told.values()
    assert (told["HARMLESS"], told["MORE"]) == ("1", "2")


async def test_the_engine_does_not_know_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", "a-key-of-somebody")
    told = tmp_path / "told"
    code = f"import os; open({str(told)!r}, 'w').write(repr(dict(os.environ)))"
    process = await EngineProcess.spawn((sys.executable, "-c", code))
    assert await process.wait() == "exited with code 0"
    assert "a-key-of-somebody" not in told.read_text()
    assert "GOMP_SPINCOUNT" in told.read_text()
