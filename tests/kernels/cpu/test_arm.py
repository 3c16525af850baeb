"""ARM's instruction sets give the bits of plain C: cross-compiled here, and run in an emulator."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from support.kernels.cpu_sections import CACHED

from appliance.kernels.cpu import build
from appliance.kernels.cpu.structs import Isa

HERE = Path(__file__).parent
COMPILER = "aarch64-linux-gnu-gcc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which("qemu-aarch64") is None,
        reason=f"{COMPILER} and qemu-aarch64 are not installed; scripts/test_tools fetches them",
    ),
]


@pytest.fixture(scope="module")
def check() -> Path:
    """The program, with the library and its sections; compiled anew when a source has changed.

    It runs for a second at -O0, which compiles in a third of -O1's time.
    """
    folder = CACHED.with_name("arm")
    program, made_of = folder / "check", folder / "made_of"
    sources = [HERE / "sections.c", HERE / "arm_check.c"]
    flags = ("-include", str(HERE / "sections.c"), f"-I{build.SOURCES}", "-O0", "-DAP_APART")
    own = b"".join(path.read_bytes() for path in sources)
    now = build.source_digest(flags, "aarch64") + hashlib.sha256(own).hexdigest()
    if program.exists() and made_of.exists() and made_of.read_text() == now:
        return program
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", COMPILER)
        build.build(folder / "libsections.so", flags)
    subprocess.run(
        [
            COMPILER, "-O0", "-std=gnu11", "-Wall", "-Werror", "-DAP_ARM",
            f"-I{build.SOURCES}", str(HERE / "arm_check.c"), str(folder / "libsections.so"),
            "-Wl,-rpath,$ORIGIN", "-lm", "-pthread", "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    made_of.write_text(now)
    return program


@pytest.mark.parametrize(
    ("processor", "runs"),
    [
        ("max", [Isa.NEON, Isa.I8MM]),
        ("cortex-a76", [Isa.NEON]),  # a Raspberry Pi 5's
        ("cortex-a53", []),
    ],
)
def test_linears_and_attention_are_those_of_plain_c(
    check: Path, processor: str, runs: list[Isa]
) -> None:
    command = ["qemu-aarch64", "-cpu", processor, "-L", "/usr/aarch64-linux-gnu", str(check)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    best = runs[-1] if runs else Isa.SCALAR
    said = [*(f"ran {isa.value}" for isa in runs), f"best {best.value}"]
    assert (finished.stdout.splitlines(), finished.returncode) == (said, 0), finished.stderr


def test_a_compiler_says_for_which_processor_it_is() -> None:
    assert build.target_of([COMPILER]) == "aarch64"
    assert build.source_digest((), "aarch64") != build.source_digest((), "x86_64")
