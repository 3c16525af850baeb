"""The CPU library with the sections of a step exported as well, each callable alone.

It is compiled from the product's sources, with its flags, again when one of them has changed.
"""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from appliance.kernels.cpu import build
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.step_structs import BatchStruct, CacheStruct
from appliance.kernels.cpu.structs import (
    AttentionStruct,
    GatingStruct,
    Isa,
    LinearStruct,
    NormStruct,
    RopeStruct,
    Status,
)

ROOT = Path(__file__).parents[4]
FILES = [ROOT / "tests" / "kernels" / "cpu" / name for name in ("sections.c", "pool_exercise.c")]
CACHED = ROOT / ".cache" / "cpu_sections" / "library.so"

# Result and arguments as in these files; an engine comes first if there is one.
_CACHE = (POINTER(AttentionStruct), POINTER(CacheStruct), c_int32)
_SECTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "write": (None, (c_void_p, *_CACHE, c_void_p, c_void_p, c_int32, c_void_p)),
    "seal": (None, (c_void_p, *_CACHE, c_int32, c_void_p, c_void_p)),
    "attend": (c_int32, (c_void_p, *_CACHE, POINTER(BatchStruct), c_void_p, c_void_p)),
    "linear": (
        c_int32,
        (c_void_p, POINTER(LinearStruct), c_void_p, c_int32, c_int32, c_void_p),
    ),
    "embedding": (None, (POINTER(LinearStruct), c_int64, c_void_p)),
    "norm": (None, (c_void_p, POINTER(NormStruct), c_int32, c_void_p)),
    "add": (None, (c_void_p, c_void_p, c_int32)),
    "scale": (None, (c_void_p, c_float, c_int32)),
    "softcap": (None, (c_void_p, c_float, c_int32)),
    "angles": (None, (POINTER(RopeStruct), c_int64, c_void_p, c_void_p)),
    "rotate": (None, (c_void_p, c_void_p, c_void_p, c_int32)),
    "gate": (None, (c_void_p, c_void_p, POINTER(GatingStruct), c_int32, c_void_p)),
    "exercise": (None, (c_void_p, c_int32, c_int64, c_void_p)),
}


def build_sections(out: Path, cflags: tuple[str, ...] = ()) -> Path:
    """Compile, unless the file was built from these sources and flags."""
    content = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]
    # Compiles in a tenth of the time; nothing here is timed, and models run the shipped library.
    quickly = ("-O1", "-DAP_APART")
    included = [word for path in FILES for word in ("-include", str(path))]
    flags = (f"-I{build.SOURCES}", f"-DAP_SECTIONS=0x{content}", *included, *quickly, *cflags)
    return build.build_if_changed(out, flags)  # other workers wait for the first


def load_sections(path: Path | None = None) -> ctypes.CDLL:
    """Load the library at a path, or the one built here; `use_isa` gives it its sections."""
    return load_library(path or build_sections(CACHED))


def use_isa(library: ctypes.CDLL, isa: Isa) -> None:
    """Use one instruction set for all calls from now on, sections included."""
    assert library.ap_use_isa(isa) == Status.OK
    for name, (restype, argtypes) in _SECTIONS.items():
        function = getattr(library, f"section_{name}_{isa.name.lower()}")
        function.restype, function.argtypes = restype, argtypes
        setattr(library, f"section_{name}", function)
