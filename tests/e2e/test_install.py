"""The wheel that `pip install .` makes contains the CPU library, or says that it does not."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from appliance.kernels.cpu import structs
from appliance.kernels.cpu.build import build_if_changed, find_compiler
from appliance.monitoring import FILES
from appliance.version import __version__

pytestmark = pytest.mark.slow

LIBRARY = "appliance/kernels/cpu/libappliance_cpu.so"


@pytest.fixture
def sources(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """The files of a checkout, without what was built in this one."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("appliance", "kernels", "quant", "tui"):
        shutil.copytree(pytestconfig.rootpath / name, folder / name, symlinks=True, ignore=built)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(pytestconfig.rootpath / name, folder)
    return folder


@pytest.fixture
def linker(tmp_path: Path) -> str:
    """A compiler whose result is always this checkout's library, which has the same sources."""
    return script(
        tmp_path / "compiled-before",
        f"""
case "$*" in *-dumpmachine*) exec {shlex.join(find_compiler())} -dumpmachine ;; esac
while [ "$1" != -o ]; do shift; done
cp {shlex.quote(str(build_if_changed()))} "$2"
""",
    )


@pytest.fixture
def compiler(tmp_path: Path, linker: str) -> str:
    """The same, but it reads its inputs and everything that they include."""
    return script(
        tmp_path / "reads-alone",
        f"""
case "$*" in *" -c "*) exec {shlex.join(find_compiler())} "$@" -M -MF /dev/null ;; esac
exec {shlex.quote(linker)} "$@"
""",
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


def python(*arguments: str | Path, **variables: str) -> str:
    """Return Python's output; it must end without an error."""
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


PIP = ("-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--verbose")
BACKEND = """
import os, sys
from setuptools.build_meta import build_wheel
os.chdir(sys.argv.pop())
build_wheel(sys.argv.pop())
"""


def make_wheel(sources: Path, folder: Path, **variables: str) -> tuple[Path, str]:
    """Build with pip and the installed setuptools, so that no index is queried."""
    output = python(*PIP, "--wheel-dir", folder, sources, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel, output


def make_wheel_alone(sources: Path, folder: Path, **variables: str) -> tuple[Path, str]:
    """Build as pip does after it has determined the build's requirements."""
    folder.mkdir()
    output = python("-c", BACKEND, folder, sources, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel, output


def installed(wheel: Path, folder: Path) -> set[str]:
    """Unpack a wheel as an installer would; check that it is for a platform, not for one Python."""
    tag = wheel.stem.removeprefix(f"appliance-{__version__}-")
    assert tag.startswith("py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return set(archive.namelist())


LOAD = """
from appliance.kernels.cpu.library import LibraryError, load_library
try:
    library = load_library()
    print(library._name, library.ap_abi())
except LibraryError as error:
    print(type(error).__name__, error)
"""


def test_the_wheel_holds_the_library_and_its_sources(
    sources: Path, tmp_path: Path, linker: str
) -> None:
    wheel, output = make_wheel(sources, tmp_path / "wheels", CC=linker)
    assert "was not compiled" not in output, output
    folder = tmp_path / "installed"
    names = installed(wheel, folder)
    assert {name for name in names if name.endswith(".so")} == {LIBRARY}
    written = {path.name for path in (sources / "kernels/cpu/src").iterdir()}
    assert {f"appliance/kernels/cpu/src/{name}" for name in written} <= names
    pages = {path.name for path in (sources / "appliance/server/dashboard/static").iterdir()}
    assert {f"appliance/server/dashboard/static/{name}" for name in pages} <= names
    assert {f"appliance/monitoring/{name}" for name in FILES.values()} <= names
    loaded = python("-P", "-c", LOAD, PYTHONPATH=str(folder))
    assert loaded.strip() == f"{folder / LIBRARY} {structs.ABI}"


def test_without_a_compiler_the_wheel_is_built_and_says_what_is_missing(
    sources: Path, tmp_path: Path, compiler: str
) -> None:
    empty, folder = tmp_path / "empty", tmp_path / "installed"
    empty.mkdir()
    wheel, output = make_wheel_alone(sources, tmp_path / "wheels", PATH=str(empty))
    (said,) = [line for line in output.splitlines() if "was not compiled" in line]
    assert "install gcc or clang" in said
    names = installed(wheel, folder)
    assert LIBRARY not in names
    assert "appliance/kernels/cpu/src/api.c" in names
    path = {"PYTHONPATH": str(folder)}
    missing = python("-P", "-c", LOAD, **path)
    assert missing.startswith("LibraryMissingError")
    assert "run: python -m appliance.kernels.cpu.build" in missing
    # The message's advice suffices on a machine that now has a compiler.
    assert "compiling" in python("-P", "-m", "appliance.kernels.cpu.build", CC=compiler, **path)
    loaded = python("-P", "-c", LOAD, **path)
    assert loaded.strip() == f"{folder / LIBRARY} {structs.ABI}"
