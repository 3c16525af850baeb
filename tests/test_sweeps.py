"""The record of passed tests is void as soon as any code changes that they run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.runs import sweeps
from support.runs.sweeps import ROOT, besides_of, code_of, digest, renew, unchanged

ALL = [str(file) for file in sweeps.files()]
KERNEL_TEST = """
from __future__ import annotations
from typing import TYPE_CHECKING
import numpy
from product.tile import width
from product.kernel import TEXT
try:
    import product.tried
except ImportError:
    pass
if TYPE_CHECKING:
    from product.typed import T
else:
    from product.untyped import T
class Tests:
    def test(self):
        with open(TEXT):
            from product import late
"""
RUN = {
    "product/__init__.py": "from product.version import NUMBER",
    "product/version.py": "NUMBER = 1",
    "product/kernel.py": "from product.tile.height import HEIGHT",
    "product/tile/__init__.py": "",
    "product/tile/width.py": "WIDTH = 32",
    "product/tile/height.py": "HEIGHT = 32",
    "product/tried.py": "",
    "product/untyped.py": "",
    "product/late.py": "import product.later.far as far",
    "product/later/__init__.py": "",
    "product/later/far.py": "",
    "support/machine/__init__.py": "import struct",
    "tests/conftest.py": "from machine import run",
    "tests/plugins/rounding.py": "",
    "tests/cases.json": "{}",
    "product/tile/widths.json": "{}",
    "library/sum.c": "",
    "tests/test_kernel.py": KERNEL_TEST,
}
NOT_RUN = {
    "product/typed.py": "",
    "product/tile/depth.py": "",
    "product/unread.py": "",
    "tests/helper.py": "",
    "tests/test_other.py": "",
    "library/notes.txt": "",
    "other/table.json": "",
}


def digest_in(folder: Path, changed: str | None = None) -> str:
    """Write the files, one of them with another line, and return the test's digest."""
    for name, text in (RUN | NOT_RUN).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\nanother = 1" * (name == changed))
    besides = tuple(folder.glob("library/*.c"))
    return digest(folder / "tests" / "test_kernel.py", besides, (folder, folder / "support"))


def test_what_a_test_runs_changes_its_digest_and_nothing_else(tmp_path: Path) -> None:
    before = digest_in(tmp_path / "before")
    changing = {
        name for name in RUN | NOT_RUN if digest_in(tmp_path / name, changed=name) != before
    }
    assert changing == set(RUN)


@pytest.mark.parametrize("library", sweeps.LIBRARIES)
def test_another_version_of_a_library_changes_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_in(tmp_path)
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found(name) + "1" * (name == library))
    assert digest_in(tmp_path) != before


def test_files_that_are_new_or_changed_are_not_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "SWEEPS", {"tests/test_*.py": ("library/*.c",)})
    before, after, library = (tmp_path / name for name in ("before", "after", "library"))
    digest_in(before)
    digest_in(after, changed="tests/test_other.py")
    digest_in(library, changed="library/sum.c")
    record = tmp_path / "passed.json"
    assert unchanged(record, before) == set()
    renew(record, before)
    assert unchanged(record, before) == {"tests/test_kernel.py", "tests/test_other.py"}
    (after / "tests" / "test_new.py").touch()
    assert unchanged(record, after) == {"tests/test_kernel.py"}
    assert unchanged(record, library) == set()


def test_the_record_is_of_files_that_are_there() -> None:
    there = {str(file.relative_to(ROOT)) for file in sweeps.files()}
    assert json.loads(sweeps.RECORD.read_text()).keys() == there
    for pattern, besides in sweeps.SWEEPS.items():
        assert all(list(ROOT.glob(glob)) for glob in (pattern, *besides)), pattern


PARTS = [["tests/test_log.py"], ALL[1:], [*ALL, "-k", "copy"], [*ALL, "--collect-only"]]
TRY = """
import json, sys, pytest
options = ["-p", "no:cacheprovider", "--sweeps=changed"]
print(*(int(pytest.main([*options, *part])) for part in json.loads(sys.argv[1])))
"""


def test_nothing_is_written_down_of_a_part() -> None:
    before = sweeps.RECORD.read_bytes()
    command = [sys.executable, "-c", TRY, json.dumps(PARTS)]  # one process imports torch once
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == [str(int(pytest.ExitCode.USAGE_ERROR))] * len(PARTS), ran.stderr
    assert ran.stderr.count("is for all of them: scripts/check_sweeps") == len(PARTS)
    assert sweeps.RECORD.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "chosen", "sure"),
    [
        ("kernels/executed/test_adapters.py", "sm_86", "kernels/adapters/kernel.py"),
        ("model/test_packaged_models.py", "cpu_library and smollm2", "appliance/model/native.py"),
        ("quant/run/test_resume.py", "full_disk and GPTQ", "quant/methods/gptq.py"),
    ],
)
def test_sweeps_load_no_module_that_is_not_seen(
    name: str, chosen: str, sure: str, tmp_path: Path
) -> None:
    file = ROOT / "tests" / name
    loaded = tmp_path / "loaded.json"
    program = f"""
import json, sys, pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", {chosen!r}, {str(file)!r}]) == 0
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
json.dump(list(filter(None, files)), open({str(loaded)!r}, "w"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    found = {Path(name).resolve() for name in json.loads(loaded.read_text())}
    ours = {
        path
        for path in found
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path.exists()
    }
    seen = {
        path.resolve()
        for path in code_of(file, besides_of(file)) | code_of(ROOT / "tests" / "conftest.py")
    }
    assert ours <= seen
    assert ROOT / sure in ours
