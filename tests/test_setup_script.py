"""The output of the first start, and what it leaves behind if it cannot succeed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs.stub_driver import DRIVERS, GTX_1080_TI, RTX_3090, RTX_5090, StubDriver
from support.runs.waiting import LIMIT, wait_until

ROOT = Path(__file__).parent.parent
TOOLS = (
    "bash", "sh", "sed", "sha256sum", "find", "rm", "mkdir", "touch", "grep", "awk", "cut",
    "cat", "cp", "dirname", "sleep", "wc", "tail",
)  # fmt: skip
# Replaces Python, of the system and in .venv: $PIP sets the result of an installation.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) exit 0 ;;
--version) echo "Python 3.13.0" ;;
"-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; eval "${VENV:-}" ;;
*"import torch"*) test -e .venv/torch ;;
*Python.h*) eval "${HEADERS:-}" ;;
"-P -") read -r line; echo "$line: ${PYTHONDONTWRITEBYTECODE:-writes bytecode}" ;;
*"pip>="*) exit 1 ;;
*"pip "*) echo "noise of pip: $*"; eval "${PIP:-}"; touch .venv/torch ;;
*build.py*) eval "${BUILD:-}" ;;
*) exit 99 ;;
esac
"""
SHIM = """#!/bin/sh
echo "shim: python3.13: command not found"
echo "The python3.13 command exists in these versions:" >&2
exit 127
"""
OFFLINE = (
    "echo 'Traceback (most recent call last):';"
    "echo 'NewConnectionError: Failed to establish a new connection'; exit 1"
)
FULL = "echo 'OSError: [Errno 28] No space left on device'; exit 1"

Setup = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the script reads, and a PATH of its own."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "kernels" / "cpu" / "src").mkdir(parents=True)
    (folder / "kernels" / "cpu" / "build.py").touch()
    shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
    (folder / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    program(tmp_path, "python3.12", PYTHON)
    program(tmp_path, "df", "#!/bin/sh\necho head\necho 'disk 9 9 30000 1% /'\n")
    program(tmp_path, "du", "#!/bin/sh\nprintf '1900\\t.venv\\n'\n")
    return folder


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def start(checkout: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [checkout / "scripts" / "setup"],
        env={"PATH": str(checkout.parent / "bin"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def setup(checkout: Path) -> Setup:
    """Run the script; return its exit code and lines."""

    def run(**environment: str) -> tuple[int, list[str]]:
        process = start(checkout, **environment)
        said, _ = process.communicate(timeout=LIMIT)
        return process.returncode, said.splitlines()

    return run


def log_of(checkout: Path) -> str:
    return (checkout / ".venv" / "setup.log").read_text()


def test_the_first_start_says_what_it_does_how_large_it_is_and_how_long_it_took(
    checkout: Path, setup: Setup
) -> None:
    code, (first, second, last) = setup()
    assert code == 0
    assert first.startswith("==> the first start installs PyTorch (for the CPU: no NVIDIA GPU")
    assert "about 450 MB to download, 1900 MB on the disk" in first
    assert first.endswith("; Python 3.13.0")
    assert second == "==> installing the appliance"
    assert last.startswith("==> installed in ")
    assert last.endswith(" s; .venv takes 1900 MB")
    assert "noise of pip" in log_of(checkout)
    assert setup() == (0, []), "the next one says nothing"


def test_the_first_start_of_a_service_finds_bytecode(checkout: Path, setup: Setup) -> None:
    code, _ = setup(PYTHONDONTWRITEBYTECODE="1")
    assert code == 0
    assert "import appliance.commands.serve: writes bytecode" in log_of(checkout)


@pytest.mark.parametrize(
    ("driver", "is_new", "kind", "build"),
    [
        (DRIVERS["580"], False, "with CUDA 13", "torch===2.13.0"),
        (StubDriver("610.43.02", 13030), True, "with CUDA 13", "torch===2.13.0"),
        (DRIVERS["570"], False, "with CUDA 12.6, as NVIDIA's driver is before 580", "+cu126"),
        (DRIVERS["550"], False, "with CUDA 12.6, as NVIDIA's driver is before 580", "+cu126"),
        (DRIVERS["535"], False, "with CUDA 12.6, as NVIDIA's driver is before 580", "+cu126"),
        (DRIVERS["470"], False, "for the CPU: NVIDIA's driver is too old for PyTorch", "+cpu"),
        (
            replace(DRIVERS["570"], cards=(RTX_5090,)),
            False,
            "for the CPU: NVIDIA's driver is too old for NVIDIA GeForce RTX 5090; update it to 580",
            "+cpu",
        ),
        (replace(DRIVERS["570"], cards=(RTX_5090, RTX_3090)), False, "with CUDA 12.6", "+cu126"),
        (replace(DRIVERS["580"], cards=(GTX_1080_TI, RTX_3090)), False, "with CUDA 13", "==="),
        (
            replace(DRIVERS["580"], cards=(GTX_1080_TI,)),
            False,
            "the kernels need compute capability 8.0, and here is NVIDIA GeForce GTX 1080 Ti (6.1)",
            "+cpu",
        ),
    ],
    ids=["580", "610", "570", "550", "535", "470", "RTX 50", "unlike", "old beside", "Pascal"],
)
def test_the_build_is_that_of_driver_and_cards(
    checkout: Path, setup: Setup, driver: StubDriver, is_new: bool, kind: str, build: str
) -> None:
    program(checkout.parent, "nvidia-smi", driver.program(is_new=is_new))
    program(checkout.parent, "gcc", "#!/bin/sh\n")
    code, lines = setup()
    assert code == 0
    assert len(lines) == 3
    assert kind in lines[0]
    assert ("8000 MB" in lines[0]) == (build != "+cpu")
    asked = [line for line in log_of(checkout).splitlines() if "install torch=" in line]
    assert len(asked) == 1
    assert build in asked[0]


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("| NVIDIA-SMI 545.46   Driver Version: 546.80   CUDA Version: ERR!  |", "CUDA 12.6"),
        ("| NVIDIA-SMI 580.95   Driver Version: 581.57   CUDA Version: N/A   |", "CUDA 13"),
        ("| NVIDIA-SMI 460.91   Driver Version: 460.91   CUDA Version: N/A   |", "for the CPU"),
    ],
)
def test_a_driver_that_does_not_name_its_cuda_has_a_number(
    checkout: Path, setup: Setup, table: str, kind: str
) -> None:
    """As in WSL and in containers without libcuda; the question for capabilities fails there."""
    program(
        checkout.parent,
        "nvidia-smi",
        f"#!/bin/sh\ncase $1 in -L) echo 'GPU 0: one';; '') echo '{table}';;"
        """ *) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;; esac\n""",
    )
    code, lines = setup()
    assert code == 0
    assert kind in lines[0]


@pytest.mark.parametrize(
    "words",
    [
        "Failed to initialize NVML: Driver/library version mismatch",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure",
        "No devices were found",
    ],
)
def test_what_nvidia_smi_says_where_it_fails_is_passed_on(
    checkout: Path, setup: Setup, words: str
) -> None:
    program(checkout.parent, "nvidia-smi", f'#!/bin/sh\necho "{words}"\nexit 9\n')
    code, lines = setup()
    assert code == 0
    assert f"for the CPU: nvidia-smi shows no GPU, but says: {words})" in lines[0]


def test_compiler_and_header_files_are_looked_for_before_gigabytes_are_fetched(
    checkout: Path, setup: Setup
) -> None:
    program(checkout.parent, "nvidia-smi", DRIVERS["580"].program())
    code, (_, line, *_) = setup(HEADERS="exit 1")
    assert code == 0
    assert "the header files of python3.12 are needed too" in line
    assert "apt install gcc python3-dev" in line


def test_a_shim_that_does_not_run_is_passed_over_in_silence(checkout: Path, setup: Setup) -> None:
    program(checkout.parent, "python3.13", SHIM)
    code, lines = setup()
    assert code == 0
    assert "shim" not in "".join(lines)
    assert len(lines) == 3


def test_without_a_python_one_line_says_what_to_install(checkout: Path, setup: Setup) -> None:
    program(checkout.parent, "python3.12", SHIM)
    code, (line,) = setup()
    assert code == 1
    assert "apt install python3 python3-venv" in line
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("knob", "does", "words"),
    [
        ("PIP", OFFLINE, "the package index cannot be reached: connect this machine"),
        ("PIP", FULL, "the disk is full: free some space for"),
        ("PIP", "exit 1", "PyTorch cannot be installed; the log is"),
        ("PIP", 'case "$*" in *editable*) exit 1;; esac', "the appliance cannot be installed;"),
        ("VENV", "exit 1", "apt install python3-venv"),
        ("VENV", FULL, "the disk is full"),
    ],
    ids=["offline", "full", "torch", "appliance", "no venv", "full at once"],
)
def test_what_fails_is_one_line_with_the_fix_and_leaves_a_log_alone(
    checkout: Path, setup: Setup, knob: str, does: str, words: str
) -> None:
    code, lines = setup(**{knob: does})
    assert code == 1
    assert words in lines[-1]
    assert str(checkout / ".venv" / "setup.log") in lines[-1]
    assert len([line for line in lines if "==>" not in line]) == 0, lines
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["setup.log"]
    code, lines = setup()
    assert code == 0, "and the next start begins as if there had been none"
    assert lines[0].startswith("==> the first start")


def test_too_small_a_disk_is_told_before_anything_is_downloaded(
    checkout: Path, setup: Setup
) -> None:
    program(checkout.parent, "df", "#!/bin/sh\necho head\necho 'disk 9 9 700 1% /'\n")
    code, (line,) = setup()
    assert code == 1
    assert "1900 MB are needed" in line
    assert "700 MB are free: free some space" in line
    assert not (checkout / ".venv").exists()


def test_what_a_killed_start_left_is_not_trusted(checkout: Path, setup: Setup) -> None:
    hangs = checkout / "hangs"
    process = start(checkout, PIP=f"touch .venv/torch {hangs}; sleep 1000")
    wait_until(hangs.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (checkout / ".venv" / "torch").exists()
    code, lines = setup()
    assert code == 0
    assert "an installation was interrupted; it begins anew" in lines[0]
    assert "noise of pip: -m pip --disable-pip-version-check install torch" in log_of(checkout)


def test_the_library_is_compiled_beside_pip_and_ends_with_it(checkout: Path, setup: Setup) -> None:
    """Each waits for the other's file, so that both must run at the same time."""
    both = "touch {0}; until test -e {1}; do sleep 0.01; done"
    code, _ = setup(PIP=both.format("piping", "building"), BUILD=both.format("building", "piping"))
    assert code == 0
    compiles = "echo $$ > compiler; exec sleep 1000"
    (checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    code, _ = setup(PIP="until test -s compiler; do sleep 0.01; done; exit 1", BUILD=compiles)
    assert code == 1
    compiler = Path("/proc", (checkout / "compiler").read_text().strip())
    wait_until(lambda: not compiler.exists() or "Z" in (compiler / "stat").read_text().split())


def test_an_update_that_fails_keeps_what_there_is(checkout: Path, setup: Setup) -> None:
    assert setup()[0] == 0
    (checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    code, lines = setup(PIP=OFFLINE)
    assert code == 1
    assert "the package index cannot be reached" in lines[-1]
    assert (checkout / ".venv" / "torch").exists()
    code, lines = setup()
    assert (code, lines[0]) == (0, "==> installing the appliance"), "it is tried again"


def test_without_a_compiler_one_line_says_what_to_install_and_says_it_once(setup: Setup) -> None:
    missing = "echo 'no C compiler; for the library, install gcc' >&2; exit 1"
    code, lines = setup(BUILD=missing)
    assert code == 0
    assert lines.count("==> no C compiler; for the library, install gcc") == 1
    assert setup(BUILD=missing) == (0, [])


@pytest.fixture
def uv(checkout: Path) -> Callable[[str], str]:
    """Make pip install an uv that does what is given; return what pip does instead of a build."""

    def make(does: str) -> str:
        program(checkout.parent, "uv-to-be", f'#!/bin/sh\necho "uv was asked: $*"\n{does}\n')
        uv = checkout.parent / "bin" / "uv-to-be"
        return f'case "$*" in *torch*+*) exit 1;; *"install uv"*) cp {uv} .venv/bin/uv; exit;; esac'

    return make


@pytest.mark.parametrize(("name", "build"), [("none", "cpu"), ("535", "cu126")])
def test_where_no_index_has_the_build_uv_finds_it(
    checkout: Path, setup: Setup, uv: Callable[[str], str], name: str, build: str
) -> None:
    if name in DRIVERS:
        program(checkout.parent, "gcc", "#!/bin/sh\n")
        program(checkout.parent, "nvidia-smi", DRIVERS[name].program())
    code, lines = setup(PIP=uv("touch .venv/torch"))
    assert code == 0
    assert len(lines) == 3
    assert "uv was asked: pip install" in log_of(checkout)
    assert f"--torch-backend {build} torch==2.13.0" in log_of(checkout)


def test_where_nobody_has_the_build_the_ordinary_one_is_taken_and_its_size_told(
    checkout: Path, setup: Setup, uv: Callable[[str], str]
) -> None:
    program(checkout.parent, "gcc", "#!/bin/sh\n")
    program(checkout.parent, "nvidia-smi", DRIVERS["535"].program())
    code, (_, no_cuda, no_cpu, *_) = setup(PIP=uv("echo 'error: connection refused'; exit 2"))
    assert code == 0
    assert "no index here has PyTorch for CUDA (cu126), so the CPU's is installed" in no_cuda
    assert "so the ordinary build is installed: about 3000 MB to download, 8000 MB" in no_cpu
    assert "install torch===2.13.0" in log_of(checkout)


def test_too_small_a_disk_for_the_ordinary_build_is_told_before_it_is_fetched(
    checkout: Path, setup: Setup, uv: Callable[[str], str]
) -> None:
    program(checkout.parent, "df", "#!/bin/sh\necho head\necho 'disk 9 9 3000 1% /'\n")
    code, lines = setup(PIP=uv("exit 2"))
    assert code == 1
    assert "8000 MB are needed" in lines[-1]


def test_bytecode_is_made_of_what_a_start_imports_late() -> None:
    script = (ROOT / "scripts" / "setup").read_text()
    imports = script.partition("-P - >>")[2].partition("\n")[2].partition("\nEND\n")[0]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"{imports}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    late = {"uvicorn", "starlette", "tokenizers", "jinja2", "numpy", "appliance.gguf.tensors"}
    late |= {
        "appliance.server.app",
        "appliance.engine.load.load_engine",
        "appliance.isolated_worker",
    }
    assert late <= set(ran.stdout.split())
