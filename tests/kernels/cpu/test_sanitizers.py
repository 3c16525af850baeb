"""The C tests again, with a library that stops at the first out-of-bounds access or undefined step.

They run in another process, which loads the sanitizers' runtimes first. Each test function runs a
few of its cases per instruction set.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.kernels.cpu_sections import CACHED, build_sections

from appliance.kernels.cpu import build
from appliance.kernels.cpu.library import load_library, supported_isas
from appliance.kernels.cpu.structs import Isa

HERE = Path(__file__).parent
DOOR = HERE.parents[1] / "model" / "test_config_door.py"
OTHERS = {"test_library.py", "test_arm.py", Path(__file__).name}  # they load other libraries
FILES = sorted(path for path in HERE.glob("test_*.py") if path.name not in OTHERS)
CASES = 3
FLAGS = (
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all", "-g1", "-O1", "-DAP_CHECKED",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """The library and its sections, compiled by gcc, whose runtimes `run` preloads.

    Code for instruction sets that this processor lacks is only linked, so it is compiled quickly
    and without sanitizers. All of it is compiled anew when a source has changed.
    """
    can_run = [isa.name.lower() for isa in supported_isas(load_library())]
    out = CACHED.with_name("-".join(("sanitized", *can_run))) / "library.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "gcc")
        for target, (define, isas) in build.TARGETS.items():
            flags = {
                isa: own if isa in can_run else (*own, "-fno-sanitize=all", "-O0")
                for isa, own in isas.items()
            }
            patch.setitem(build.TARGETS, target, (define, flags))
        return build_sections(out, FLAGS)


def run(
    arguments: Sequence[str | Path], seconds: float = 250, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the runtimes; a report goes to standard error and ends the process."""
    runtimes = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    sanitizers = {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python does not free everything at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **sanitizers, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )


def test_the_c_tests_pass_with_sanitizers(sanitized: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    # Standard error is not captured, else a sanitizer's last words would be lost.
    options = ["-q", "-x", "--capture=sys", "-p", "no:cacheprovider", f"--junitxml={report}"]
    finished = run(
        ["-m", "pytest", *options, *FILES],
        APPLIANCE_TEST_CPU_LIBRARY=str(sanitized),
        APPLIANCE_TEST_CPU_CASES=str(CASES),
    )
    assert finished.returncode == 0, finished.stdout[-20_000:]
    cases = ElementTree.parse(report).iter("testcase")
    passed = {case.get("classname") for case in cases if not len(case)}
    ran = {name.rpartition(".")[2] for name in passed if name}
    assert ran == {path.stem for path in FILES}, "a file has no test with the library of conftest"


@pytest.mark.timeout(0)  # the program that it starts has a limit of its own
def test_settings_of_a_stranger_reach_nothing_out_of_bounds(
    sanitized: Path, request: pytest.FixtureRequest
) -> None:
    """Runs --header-cases from --header-seed; 50000 take eight minutes or more."""
    cases = request.config.getoption("header_cases")
    finished = run(
        [
            "-m",
            "pytest",
            "-q",
            "-x",
            "--capture=sys",
            "-p",
            "no:cacheprovider",
            "--timeout=0",
            DOOR,
        ],
        seconds=250 + cases,
        APPLIANCE_TEST_CPU_LIBRARY=str(sanitized),
        APPLIANCE_TEST_HEADER_CASES=str(cases),
        APPLIANCE_TEST_HEADER_SEED=str(request.config.getoption("header_seed")),
    )
    assert finished.returncode == 0, finished.stdout[-20_000:]


PLANTED_OVERFLOW = """
import ctypes, sys
from pathlib import Path
import numpy
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.structs import NormStruct

library = load_library(Path(sys.argv[1]))
weight, x = numpy.ones(77, numpy.float32), numpy.ones(77, numpy.float32)
out = numpy.empty(int(sys.argv[3]), numpy.float32)
norm = NormStruct(weight.ctypes.data, 1e-5)
section = getattr(library, f"section_norm_{sys.argv[2]}")
section.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
section(x.ctypes.data, ctypes.addressof(norm), 77, out.ctypes.data)
print("survived")
"""


@pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("short", [False, True], ids=["large enough", "one float short"])
def test_a_write_past_an_array_is_found(
    sanitized: Path, loaded: ctypes.CDLL, isa: Isa, short: bool
) -> None:
    """A float past 77 is the last lane of a partial vector, which a mask stores."""
    if not loaded.ap_isa_supported(isa):
        pytest.skip(f"this CPU has no {isa.name}")
    finished = run(["-c", PLANTED_OVERFLOW, sanitized, isa.name.lower(), str(77 - short)])
    assert ("AddressSanitizer: heap-buffer-overflow" in finished.stdout) == short, finished.stdout
    assert ("survived" in finished.stdout) != short
    assert (finished.returncode != 0) == short


def test_what_the_sanitizers_cannot_see_is_touched() -> None:
    """gcc knows these intrinsics only as instructions, and checks none of their addresses."""
    unseen = re.compile(r"_(mask\w*(load|store)|\w*(gather|scatter|lddqu|broadcast_[sp][sd]\b))")
    found = 0
    for path in build.SOURCES.iterdir():
        for function in path.read_text().split("INLINE")[1:]:
            if unseen.search(function):
                found += 1
                assert "touch(" in function, f"{path.name}: {function}"
    assert found


PLANTED_STEPS = """
#include <stdint.h>
#define EXPORT __attribute__((visibility("default")))
EXPORT int32_t shift(int32_t by) { return 1 << by; }
EXPORT int32_t add(int32_t to) { return to + INT32_MAX; }
EXPORT int32_t load(int32_t at) {
    static const int32_t values[4];
    return *(const int32_t *)((const char *)values + at);
}
EXPORT int32_t whole(int32_t zero) { return (int32_t)(1e20 + zero); }
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    source, out = folder / "planted.c", folder / "planted.so"
    source.write_text(PLANTED_STEPS)
    subprocess.run(["gcc", *build.FLAGS, *FLAGS, "-shared", source, "-o", out], check=True)
    return out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("shift(3)", ""),
        ("load(4)", ""),
        ("shift(40)", "shift exponent 40 is too large"),
        ("add(1)", "signed integer overflow"),
        ("load(1)", "load of misaligned address"),
        ("whole(0)", "outside the range of representable values"),
    ],
)
def test_an_undefined_step_is_found(planted: Path, call: str, expected: str) -> None:
    code = f"import ctypes, sys; print('survived', ctypes.CDLL(sys.argv[1]).{call})"
    finished = run(["-c", code, planted])
    assert ("survived" in finished.stdout) == (not expected), finished.stdout
    assert expected in finished.stdout
    assert ("runtime error" in finished.stdout) == bool(expected)
