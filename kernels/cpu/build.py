"""Compiles the CPU library: once for each instruction set, linked into one shared object.

Runs while the package is being built, so it imports nothing but the standard library. Also: `python
-m appliance.kernels.cpu.build [--if-changed] [--out FILE] [--cflags FLAGS]`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARY = SOURCES.with_name("libappliance_cpu.so")
# In a checkout kernels/ lies beside the package, in an installed package inside it.
VERSION_FILE = next(
    path
    for path in (SOURCES.parents[2] / "version.py", SOURCES.parents[2] / "appliance" / "version.py")
    if path.is_file()
)

# No contraction: on every path, only a fused multiply-add in the source is one.
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror=implicit",
)
_AVX512 = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
)
X86_FLAGS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
ARM_FLAGS = {
    "scalar": (),
    "neon": ("-march=armv8.2-a+dotprod",),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
# By the compiler's target processor: our name for it, and its instruction sets.
TARGETS = {"x86_64": ("-DAP_X86", X86_FLAGS), "aarch64": ("-DAP_ARM", ARM_FLAGS)}
# Compiled once, for any processor.
COMMON = ("api.c", "group.c", "pool.c", "pack.c", "pack_planes.c", "page.c", "mask.c", "sums.c")

_REMEDY = (
    "PyTorch's slower kernels do its work. For the library, install gcc or clang (gcc 11, clang 12 "
    "or newer; Debian, Ubuntu: apt install gcc libc6-dev), then run: "
    "python -m appliance.kernels.cpu.build"
)


class BuildError(Exception):
    """There is no compiler, or it failed; the message says what to do."""


def find_compiler() -> list[str]:
    """Return the command of the C compiler: CC if it is set, else gcc, clang or cc.

    Raises:
        BuildError: there is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for words in [chosen] if chosen else [["gcc"], ["clang"], ["cc"]]:
        if shutil.which(words[0]):
            return words
    missing = f"the C compiler that CC names, {chosen[0]}," if chosen else "a C compiler"
    raise BuildError(f"the CPU library was not compiled, as {missing} was not found; {_REMEDY}")


def target_of(compiler: list[str]) -> str:
    """Return the target processor of a compiler, such as x86_64 or aarch64."""
    asked = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = asked.stdout.partition("-")[0].strip() or platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def source_digest(cflags: tuple[str, ...] = (), target: str = "") -> str:
    """Return 40 hexadecimal digits that identify all that the library is made from.

    Args:
        cflags: further flags.
        target: target processor; empty for this machine's.
    """
    content = hashlib.sha256(repr((cflags, target or platform.machine())).encode())
    for path in (Path(__file__), VERSION_FILE, *sorted(SOURCES.glob("*.[ch]"))):
        content.update(b"\0%b\0%b" % (path.name.encode(), path.read_bytes()))
    return content.hexdigest()[:40]


def is_current(library: Path = LIBRARY, cflags: tuple[str, ...] = ()) -> bool:
    """Return True if the file's build id matches the sources."""
    return library.is_file() and bytes.fromhex(source_digest(cflags)) in library.read_bytes()


def build_if_changed(out: Path = LIBRARY, cflags: tuple[str, ...] = ()) -> Path:
    """Build, unless the library is of these sources; wait for a build in progress.

    Args and errors are those of `build`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return out if is_current(out, cflags) else build(out, cflags)
    finally:
        os.close(folder)


def build(out: Path = LIBRARY, cflags: tuple[str, ...] = ()) -> Path:
    """Compile and link.

    Args:
        out: the shared object, replaced only by a finished one. A failure removes it, unless it is
            of these very sources.
        cflags: further flags, such as those of a sanitizer.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    try:
        _compile(find_compiler(), out, cflags)
    except BuildError:
        if not is_current(out, cflags):
            out.unlink(missing_ok=True)
        raise
    return out


def _compile(compiler: list[str], out: Path, cflags: tuple[str, ...]) -> None:
    logger.info("compiling the CPU library with %s", shlex.join(compiler))
    target = target_of(compiler)
    build_id = source_digest(cflags, target)
    define, isas = TARGETS.get(target, ("-DAP_OTHER", {"scalar": ()}))
    version = VERSION_FILE.read_text().split('"')[-2]
    flags = [*FLAGS, f'-DAP_VERSION="{version}"', define, *cflags]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            [*flags, *own, f"-DAP_ISA={isa}", "-c", str(SOURCES / "isa.c")]
            for isa, own in isas.items()
        ]
        jobs += [[*flags, "-c", str(SOURCES / name)] for name in COMMON]
        objects = [f"{folder}/{number}.o" for number in range(len(jobs))]
        commands = [[*compiler, *job, "-o", name] for job, name in zip(jobs, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for running in [pool.submit(_run, command) for command in commands]:
                try:
                    running.result()
                except BuildError:
                    pool.shutdown(cancel_futures=True)
                    raise
        partial = out.with_name(f"{out.stem}.{os.getpid()}.so")
        link = ["-shared", "-pthread", f"-Wl,--build-id=0x{build_id}", *cflags]
        _run([*compiler, *link, *objects, "-o", str(partial), "-lm"])
        partial.replace(out)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(
            f"the CPU library was not compiled, as the C compiler failed; {_REMEDY}\n"
            f"{shlex.join(command)}\n{result.stderr}"
        )


def main() -> None:
    """Build as the command line says; a failure prints its message and exits with status 1."""
    parser = argparse.ArgumentParser(description="Compile the CPU library.")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="file to write")
    parser.add_argument("--cflags", type=shlex.split, default=[], help="further flags")
    parser.add_argument(
        "--if-changed", action="store_true", help="do nothing if the library is of these sources"
    )
    options = parser.parse_args()
    cflags = tuple(options.cflags)
    logging.basicConfig(format="==> %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        (build_if_changed if options.if_changed else build)(options.out, cflags)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
