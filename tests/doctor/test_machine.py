from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.config import EngineConfig
from appliance.doctor import machine
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.machine import check_cpu_library, check_memory, check_wsl
from appliance.hub import ResolvedModel
from appliance.kernels.cpu import build
from appliance.kernels.cpu.library import load_library

Look = Callable[[Check, Scope], dict[str, Finding]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a system, which has no container."""
    (tmp_path / "root" / "proc").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def _isa_as_before() -> Iterator[None]:
    """Restore the instruction set, which the library has once for the whole process."""
    library = load_library()
    before = library.ap_current_isa()
    yield
    library.ap_use_isa(before)


def test_memory_is_compared_with_the_weights(look: Look, root: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    with model.open("wb") as file:
        file.truncate(1 << 43)  # a sparse file
    scope = Scope(root=root, model=ResolvedModel(model, "large"))
    found = look(check_memory, scope)["memory"]
    assert (found.grade, "8,192.0 GiB" in found.found) == (Grade.WARN, True)
    model.write_bytes(b"")
    assert look(check_memory, scope)["memory"].grade is Grade.OK


def test_the_limit_of_a_container_counts(look: Look, root: Path) -> None:
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("104857600\n")
    (group / "memory.current").write_text("1000\n")
    found = look(check_memory, Scope(root=root))["memory"]
    assert (found.grade, "this container may take 0.1 GiB" in found.found) == (Grade.WARN, True)
    (group / "memory.max").write_text("max\n")
    assert "container" not in look(check_memory, Scope(root=root))["memory"].found


def test_windows_below_linux(look: Look, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(check_wsl, Scope(root=root))["system"].grade is Grade.UNKNOWN
    (root / "proc/version").write_text("Linux version 6.1 (Debian)")
    assert "not below Windows" in look(check_wsl, Scope(root=root))["system"].found
    (root / "proc/version").write_text("Linux version 5.15-microsoft-standard-WSL2")
    assert look(check_wsl, Scope(root=root))["system"].grade is Grade.OK
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", "/mnt/c/models")
    found = look(check_wsl, Scope(root=root))["system"]
    assert (found.grade, "/mnt/c/models" in found.found) == (Grade.WARN, True)


@pytest.mark.usefixtures("_isa_as_before")
def test_the_instructions_that_serve_are_named(look: Look) -> None:
    chosen = look(check_cpu_library, Scope(engine=EngineConfig(cpu_isa="scalar")))["CPU library"]
    assert (chosen.grade, "scalar serves" in chosen.found) == (Grade.WARN, True)
    torch = look(check_cpu_library, Scope(engine=EngineConfig(kernels="torch")))["CPU library"]
    assert (torch.grade, torch.fix) == (Grade.WARN, "set kernels to auto")


def test_a_library_that_is_missing_and_no_compiler(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = tmp_path / "lib.so"
    monkeypatch.setattr(machine, "load_library", lambda: load_library(nowhere))
    monkeypatch.setattr(build, "LIBRARY", nowhere)
    monkeypatch.setenv("CC", "no-such-compiler")
    found = look(check_cpu_library, Scope())
    assert found["CPU library"].grade is Grade.WARN
    assert "PyTorch serves" in found["CPU library"].found
    assert "python -m appliance.kernels.cpu.build" in found["CPU library"].fix
    assert (found["compiler"].grade, "apt install" in found["compiler"].fix) == (Grade.WARN, True)
    wanted = look(check_cpu_library, Scope(engine=EngineConfig(cpu_isa="avx2")))["CPU library"]
    assert wanted.grade is Grade.FAIL
