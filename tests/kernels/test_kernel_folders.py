"""A kernel folder follows docs/extending.md, and its kernels are compiled and executed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.kernels.compiled_kernels.signature import MOST_COMPILED
from support.kernels.compiled_kernels.signatures import signatures

ROOT = Path(__file__).parent.parent.parent
KERNELS, EXECUTED = ROOT / "kernels", ROOT / "tests" / "kernels" / "executed"
LAUNCHED = sorted(path.parent.name for path in KERNELS.glob("*/launch.py"))


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_a_folder_says_what_it_computes_and_imports_nothing(path: Path) -> None:
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), "say in a sentence what the folder computes"
    assert len(module.body) == 1, "import from the file that has the name: reference, launch, rows"


@pytest.mark.parametrize("folder", LAUNCHED)
def test_a_kernel_is_compiled_for_every_architecture(folder: str) -> None:
    compiled = {signature.module.split(".")[2] for signature in signatures(MOST_COMPILED)}
    assert folder in compiled, (
        "add a file to tests/support/support/kernels/compiled_kernels/signatures"
    )


@pytest.mark.parametrize("folder", LAUNCHED)
def test_a_kernel_is_executed(folder: str) -> None:
    launch = re.compile(rf"appliance\.kernels\.{folder}(\.launch import| import .*\blaunch\b)")
    texts = [path.read_text() for path in EXECUTED.glob("*.py")]
    assert any(map(launch.search, texts)), "add a test to tests/kernels/executed"
