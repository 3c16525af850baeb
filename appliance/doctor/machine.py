"""Checks memory, Windows below Linux, and the CPU library."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator

from appliance.config import cache_dir
from appliance.doctor.finding import Finding, Grade, Scope, show_gib
from appliance.kernels.cpu import build
from appliance.kernels.cpu.library import (
    LibraryError,
    UnsupportedIsaError,
    load_library,
    select_isa,
    supported_isas,
)
from appliance.kernels.cpu.structs import Isa
from appliance.model_files.gguf_names import parts_of

LEAST_AVAILABLE = 2**30  # the default model, its KV cache and both processes
_WINDOWS_DISK = re.compile(r"/mnt/[a-z](/|$)")


def check_memory(scope: Scope) -> Iterator[Finding]:
    """Compare available memory with the model's weights."""
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_limit(scope)
    found = f"{show_gib(memory.available)} of {show_gib(memory.total)} available"
    if limit is not None:
        found += f"; this container may take {show_gib(limit)}"
    available = memory.available if limit is None else min(memory.available, limit)
    weights = weight_bytes(scope)
    if weights is not None:
        found += f"; the model's files have {show_gib(weights)}"
    needed = LEAST_AVAILABLE if weights is None else weights
    fits = available >= needed
    fix = "" if fits else "end other programs, or take a smaller or more quantized model"
    yield Finding("memory", Grade.OK if fits else Grade.WARN, found, fix)


def check_wsl(scope: Scope) -> Iterator[Finding]:
    """Report if this Linux runs under Windows, and which files are slow there."""
    try:
        version = (scope.root / "proc/version").read_text()
    except OSError as error:
        yield Finding("system", Grade.UNKNOWN, f"/proc/version: {error.strerror}")
        return
    system = f"{platform.system()} {platform.release()}"
    if "microsoft" not in version.lower():
        yield Finding("system", Grade.OK, f"{system}, not below Windows")
        return
    paths = [cache_dir(), *([scope.model.path] if scope.model else [])]
    if slow := [str(path) for path in paths if _WINDOWS_DISK.match(str(path.absolute()))]:
        fix = "move them to the Linux disk, such as ~/.cache: files of Windows are read slowly"
        yield Finding("system", Grade.WARN, f"WSL, with {shlex.join(slow)} on Windows' disk", fix)
    else:
        yield Finding("system", Grade.OK, f"{system}, WSL; memory is limited by .wslconfig")


def check_cpu_library(scope: Scope) -> Iterator[Finding]:
    """Load the C library as an engine does, and name the instructions it would use."""
    choice = scope.engine.cpu_isa
    try:
        library = load_library()
        isa = select_isa(library, choice)
    except UnsupportedIsaError as error:
        yield Finding("CPU library", Grade.FAIL, str(error), "set cpu_isa to auto")
    except LibraryError as error:
        grade = Grade.FAIL if choice != "auto" else Grade.WARN
        words, _, fix = str(error).rpartition("; ")
        yield Finding("CPU library", grade, f"{words}; PyTorch serves, more slowly", fix)
    else:
        names = ", ".join(one.name.lower() for one in supported_isas(library))
        found = f"{isa.name.lower()} serves, of {names}; {os.cpu_count()} processors"
        if scope.engine.kernels != "auto":
            fix = "set kernels to auto"
            found += f"; but kernels = {scope.engine.kernels}, so PyTorch serves, more slowly"
            yield Finding("CPU library", Grade.WARN, found, fix)
        elif isa is Isa.SCALAR:
            fix = "set cpu_isa to auto; without AVX2 a processor of 2015 or later helps"
            yield Finding("CPU library", Grade.WARN, f"{found}; many times slower", fix)
        else:
            yield Finding("CPU library", Grade.OK, found)
    yield _compiler()


def _compiler() -> Finding:
    try:
        words = build.find_compiler()
    except build.BuildError:
        if build.LIBRARY.is_file():
            return Finding("compiler", Grade.OK, "none, and none is needed: the library is there")
        fix = "apt install gcc libc6-dev, then: python -m appliance.kernels.cpu.build"
        return Finding("compiler", Grade.WARN, "no C compiler was found", fix)
    if build.LIBRARY.is_file() and build.SOURCES.is_dir() and not build.is_current():
        fix = "python -m appliance.kernels.cpu.build"
        found = "the CPU library was compiled from other sources or with other flags"
        return Finding("compiler", Grade.WARN, found, fix)
    return Finding("compiler", Grade.OK, shlex.join(words))


def weight_bytes(scope: Scope) -> int | None:
    """Return the size of the model's weight files; None without a model."""
    if scope.model is None:
        return None
    path = scope.model.path
    files = parts_of(path) if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _cgroup_limit(scope: Scope) -> int | None:
    """Return the bytes that a container may still use; None without a limit."""
    folder = scope.root / "sys/fs/cgroup"
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used
