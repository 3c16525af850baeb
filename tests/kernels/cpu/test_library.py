"""Only this package's own library is called; every refusal says what to do."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.config import EngineConfig
from appliance.errors import ConfigError
from appliance.kernels.cpu import build, library, step_structs, structs
from appliance.kernels.cpu.library import (
    LibraryLoadError,
    LibraryMismatchError,
    LibraryMissingError,
    UnsupportedIsaError,
    load_library,
    select_isa,
    supported_isas,
)
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.version import __version__

SIZES = {name: ctypes.sizeof(struct) for name, struct in step_structs.STRUCTS.items()}
REBUILD = "run: python -m appliance.kernels.cpu.build"


def compile_fake(
    folder: Path,
    *,
    abi: int = structs.ABI,
    version: str = __version__,
    sizes: dict[str, int] = SIZES,
    leave_out: str = "",
) -> Path:
    """A library that has every function and gives set answers, but computes nothing."""
    answers = {
        "ap_abi": f"int ap_abi(void) {{ return {abi}; }}",
        "ap_build_version": f'const char *ap_build_version(void) {{ return "{version}"; }}',
        "ap_struct_bytes": "long ap_struct_bytes(const char *name) {"
        + "".join(f'if (!strcmp(name, "{name}")) return {size};' for name, size in sizes.items())
        + "return -1; }",
    }
    functions = {name: f"void {name}(void) {{}}" for name in library.SIGNATURES} | answers
    functions.pop(leave_out, None)
    source = folder / "fake.c"
    source.write_text("#include <string.h>\n" + "\n".join(functions.values()))
    out = folder / "fake.so"
    subprocess.run([*build.find_compiler(), "-shared", "-fPIC", source, "-o", out], check=True)
    return out


def test_the_fake_library_has_nothing_wrong(tmp_path: Path) -> None:
    assert load_library(compile_fake(tmp_path)).ap_abi() == structs.ABI


def test_a_library_that_was_not_compiled_names_the_compiler_to_install(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissingError, match="install gcc or clang") as caught:
        load_library(tmp_path / "absent.so")
    assert REBUILD in str(caught.value)


@pytest.mark.parametrize("damage", ["empty", "text", "another processor"])
def test_a_file_that_is_no_library_of_this_machine(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "library.so"
    if damage == "another processor":
        content = bytearray(compile_fake(tmp_path).read_bytes())
        content[18:20] = (0xF3).to_bytes(2, "little")  # e_machine: RISC-V
        path.write_bytes(content)
    else:
        path.write_text(damage.removeprefix("empty"))
    with pytest.raises(LibraryLoadError, match=str(path)) as caught:
        load_library(path)
    assert REBUILD in str(caught.value)


def assert_mismatch(path: Path, expected: str) -> None:
    with pytest.raises(LibraryMismatchError, match=expected) as caught:
        load_library(path)
    assert str(path) in str(caught.value)
    assert REBUILD in str(caught.value)


def test_another_abi_is_refused(tmp_path: Path) -> None:
    wrong = structs.ABI + 1
    assert_mismatch(compile_fake(tmp_path, abi=wrong), f"ABI is {wrong}, not {structs.ABI}")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = compile_fake(tmp_path, version="0.0.1")
    assert_mismatch(path, rf"of version 0\.0\.1, not {__version__}")


@pytest.mark.parametrize("name", SIZES)
def test_a_struct_of_another_size_is_refused(tmp_path: Path, name: str) -> None:
    path = compile_fake(tmp_path, sizes=SIZES | {name: SIZES[name] + 8})
    assert_mismatch(path, f"its {name} has {SIZES[name] + 8} bytes, not {SIZES[name]}")


@pytest.mark.parametrize("name", ["ap_abi", "ap_build_version", "ap_struct_bytes", "ap_step"])
def test_a_library_without_one_of_the_functions_is_refused(tmp_path: Path, name: str) -> None:
    assert_mismatch(compile_fake(tmp_path, leave_out=name), f"it has no {name};")


def header_text() -> str:
    names = ("appliance_cpu.h", "formats.h", "mixers.h", "routed.h")
    return "".join((build.SOURCES / name).read_text() for name in names)


def test_every_struct_of_the_header_is_checked() -> None:
    header = header_text()
    declared = {line[2:].rstrip(";") for line in header.splitlines() if line.startswith("} ap_")}
    enums = {"ap_status", "ap_isa", "ap_format", "ap_offset_kind", "ap_activation", "ap_scoring"}
    enums |= {"ap_scale_format", "ap_ggml_type", "ap_head_norms", "ap_output_gate"}
    assert declared - enums == set(step_structs.STRUCTS)


def test_the_constants_are_those_of_the_header() -> None:
    header = header_text()
    assert f"#define AP_ABI {structs.ABI} " in header
    assert f"#define AP_LANES {structs.LANES} " in header
    for values in (structs.Status, structs.Isa, structs.Format, structs.Offset):
        for value in values:
            assert f"AP_{value.name} = {value.value}" in header
    for scales in structs.ScaleFormat:
        prefix = "AP_" if scales is structs.ScaleFormat.E8M0 else "AP_SCALES_"
        assert f"{prefix}{scales.name} = {scales.value}" in header
    for name, kind in GGML_TYPES.items():
        assert f"AP_GGML_{name} = {kind.number}," in header


# ---- instruction sets


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is but one instruction set")
def test_the_instruction_sets_are_those_that_the_compiler_sees(
    loaded: ctypes.CDLL, tmp_path: Path
) -> None:
    """The compiler's runtime decides: in an emulator /proc/cpuinfo is wrong."""
    avx2 = ["avx2", "fma", "f16c"]
    avx512 = [*avx2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"]
    needs = {
        Isa.SCALAR: ["sse2"],
        Isa.AVX2: avx2,
        Isa.AVXVNNI: [*avx2, "avxvnni"],
        Isa.AVX512: avx512,
        Isa.AMX: [*avx512, "amx-tile", "amx-int8", "amx-bf16"],
    }
    functions = [
        f"int {isa.name.lower()}(void) {{ return "
        + " && ".join(f'__builtin_cpu_supports("{word}")' for word in words)
        + "; }"
        for isa, words in needs.items()
    ]
    source, out = tmp_path / "seen.c", tmp_path / "seen.so"
    source.write_text("\n".join(functions))
    subprocess.run([*build.find_compiler(), "-shared", "-fPIC", source, "-o", out], check=True)
    seen, ours = ctypes.CDLL(str(out)), ctypes.CDLL(loaded._name)
    for isa in Isa:
        expected = isa in needs and bool(seen[isa.name.lower()]())
        assert bool(ours.ap_isa_supported(isa)) == expected, isa


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such moves")
def test_nothing_relies_on_masked_moves_of_avx() -> None:
    """An emulator, or a processor by AMD's manual, may fault on lanes that the mask leaves out."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(build.LIBRARY)]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "vfmadd" in code, "AVX2 is in it"
    assert not re.findall(r"\tvp?maskmov\w+", code)


def test_each_supported_instruction_set_can_be_chosen(library: ctypes.CDLL) -> None:
    isa = Isa(library.ap_current_isa())
    assert select_isa(library, isa.name.lower()) is isa
    assert library.ap_current_isa() == isa


def test_auto_takes_the_fastest(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Isa(library.ap_current_isa())  # pretend that this machine has nothing better
    supported = library.ap_isa_supported
    monkeypatch.setattr(library, "ap_isa_supported", lambda isa: isa <= best and supported(isa))
    assert select_isa(library) is best


@pytest.mark.parametrize("choice", ["avx512", "neon"])
def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(
    loaded: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    before = loaded.ap_current_isa()
    monkeypatch.setattr(loaded, "ap_isa_supported", lambda isa: isa in (Isa.SCALAR, Isa.AVX2))
    with pytest.raises(UnsupportedIsaError, match=f"{choice}.*it has scalar, avx2"):
        select_isa(loaded, choice)
    assert loaded.ap_current_isa() == before


def test_the_setting_knows_every_instruction_set() -> None:
    for isa in Isa:
        assert EngineConfig(cpu_isa=isa.name.lower()).cpu_isa == isa.name.lower()
    with pytest.raises(ConfigError, match="one of auto, ") as caught:
        EngineConfig(cpu_isa="")
    assert all(isa.name.lower() in str(caught.value) for isa in Isa)


# ---- the build


def test_the_packages_library_is_of_these_sources() -> None:
    assert build.is_current(), "the sources have changed; scripts/setup compiles them"


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile quickly, in place of the real ones."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name in (*build.COMMON, "isa.c"):
        (folder / name).write_text("")
    (folder / "api.c").write_text('#include "small.h"\nconst char *version = AP_VERSION SUFFIX;\n')
    (folder / "small.h").write_text('#define SUFFIX ""\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def version_in(path: Path) -> bytes:
    value = ctypes.c_char_p.in_dll(ctypes.CDLL(str(path)), "version").value
    assert value is not None
    return value


VISIBLE = ("-fvisibility=default",)


def test_a_change_of_a_source_or_a_flag_makes_the_library_out_of_date(
    tmp_path: Path, small_sources: Path
) -> None:
    out = build.build(tmp_path / "new folder" / "library.so", VISIBLE)
    assert version_in(out) == __version__.encode()
    assert build.is_current(out, VISIBLE)
    assert not build.is_current(out)
    (small_sources / "small.h").write_text('#define SUFFIX "+changed"\n')
    assert not build.is_current(out, VISIBLE)
    again = build.build(tmp_path / "again.so", VISIBLE)
    assert version_in(again) == __version__.encode() + b"+changed"
    assert build.is_current(again, VISIBLE)


@pytest.mark.parametrize("found", ["none", "CC names another", "it fails"])
def test_a_failed_build_says_why_and_leaves_no_library_of_other_sources(
    tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    out = build.build(tmp_path / "library.so")
    expected = "install gcc or clang"
    if found == "none":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    elif found == "CC names another":
        monkeypatch.setenv("CC", "no-such-compiler -m64")
        expected = "CC names, no-such-compiler, was not found.*" + expected
    else:
        monkeypatch.setenv("CC", sys.executable)
        expected = "the C compiler failed"
    with pytest.raises(build.BuildError, match=expected):
        build.build(out)
    assert build.is_current(out)  # it was built from these sources, so nothing is lost
    (small_sources / "small.h").write_text("")
    with pytest.raises(build.BuildError, match="the CPU library was not compiled"):
        build.build(out)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_command_line_compiles_when_something_changed(
    tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "library.so"
    monkeypatch.setattr(sys, "argv", ["build.py", "--if-changed", "--out", str(out)])
    build.main()
    first = out.stat().st_ino
    build.main()
    assert out.stat().st_ino == first
    (small_sources / "small.h").write_text('#define SUFFIX ""\n#define OTHER\n')
    build.main()
    assert out.stat().st_ino != first
    (small_sources / "small.h").write_text("")
    monkeypatch.setenv("CC", "no-such-compiler")
    for _ in range(2):
        with pytest.raises(SystemExit, match="install gcc or clang"):
            build.main()
        assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
def test_clang_compiles_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "clang")
    built = load_library(build.build(tmp_path / "library.so"))
    assert select_isa(built) is supported_isas(built)[-1]
