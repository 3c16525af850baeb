"""Finds and loads the CPU library, and checks that it is the one that belongs to this package.

LibraryError
├── LibraryMissingError    it was not compiled
├── LibraryLoadError       the system's loader refuses it
├── LibraryMismatchError   it was compiled from other sources than this package's
└── UnsupportedIsaError    an instruction set that this CPU, or the library, does not have

Messages say in one line what is wrong and what to do.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from appliance.kernels.cpu import step_structs, structs
from appliance.kernels.cpu.structs import Isa, Status
from appliance.version import __version__

LIBRARY = Path(__file__).resolve().parent / "libappliance_cpu.so"

_REBUILD = "run: python -m appliance.kernels.cpu.build"

_POINTER = c_void_p
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ap_abi": (c_int32, ()),
    "ap_build_version": (c_char_p, ()),
    "ap_struct_bytes": (c_int64, (c_char_p,)),
    "ap_isa_supported": (c_int32, (c_int32,)),
    "ap_use_isa": (c_int32, (c_int32,)),
    "ap_current_isa": (c_int32, ()),
    "ap_engine_create": (c_void_p, (c_int32, c_int64)),
    "ap_engine_destroy": (None, (c_void_p,)),
    "ap_workspace_bytes": (c_int64, (c_void_p,)),
    "ap_step": (
        c_int32,
        (
            c_void_p,
            POINTER(structs.ModelStruct),
            POINTER(step_structs.CacheStruct),
            POINTER(step_structs.BatchStruct),
            _POINTER,
            _POINTER,
        ),
    ),
    "ap_make_room": (
        c_int32,
        (
            c_void_p,
            POINTER(structs.ModelStruct),
            POINTER(step_structs.CacheStruct),
            POINTER(step_structs.BatchStruct),
        ),
    ),
    "ap_head": (
        c_int32,
        (c_void_p, POINTER(structs.ModelStruct), _POINTER, c_int32, _POINTER),
    ),
    "ap_quantized_at": (
        POINTER(structs.LinearStruct),
        (POINTER(structs.ModelStruct), c_int32, c_int32),
    ),
    "ap_run_experts": (
        c_int32,
        (
            c_void_p,
            POINTER(structs.ExpertsStruct),
            POINTER(structs.GatingStruct),
            POINTER(structs.RoutedStruct),
        ),
    ),
    "ap_attend": (
        c_int32,
        (
            c_void_p,
            POINTER(structs.AttentionStruct),
            POINTER(step_structs.CacheStruct),
            c_int32,
            POINTER(step_structs.BatchStruct),
            _POINTER,
            _POINTER,
        ),
    ),
    "ap_multiply": (
        c_int32,
        (c_void_p, POINTER(structs.LinearStruct), _POINTER, c_int32, _POINTER),
    ),
    "ap_rows": (
        c_int32,
        (c_void_p, POINTER(structs.LinearStruct), _POINTER, c_int32, _POINTER),
    ),
    "ap_sample": (
        c_int32,
        (c_void_p, _POINTER, c_int32, c_int32, POINTER(step_structs.SamplingStruct), _POINTER),
    ),
    "ap_score": (
        c_int32,
        (
            c_void_p,
            _POINTER,
            c_int32,
            c_int32,
            _POINTER,
            c_int32,
            _POINTER,
            _POINTER,
            _POINTER,
        ),
    ),
    "ap_mask_logits": (None, (_POINTER, c_int32, c_int32, _POINTER, _POINTER, c_int32)),
    "ap_engine_watch": (None, (c_void_p, c_void_p)),
    "ap_engine_join": (None, (c_void_p, c_void_p)),
    "ap_group_bytes": (c_int64, (c_int32, c_int64)),
    "ap_group_create": (c_void_p, (_POINTER, c_int32, c_int32, c_int64, _POINTER)),
    "ap_group_destroy": (None, (c_void_p,)),
    "ap_group_await": (c_int32, (c_void_p,)),
    "ap_group_meet": (c_int32, (c_void_p,)),
    "ap_group_sum": (c_int32, (c_void_p, _POINTER, c_int64)),
    "ap_group_exchange": (c_int32, (c_void_p, c_int32)),
    "ap_group_slot": (c_void_p, (c_void_p, c_int32, c_int32)),
    "ap_linear_pack": (
        c_int32,
        (
            c_void_p,
            POINTER(structs.LinearStruct),
            _POINTER,
            _POINTER,
            _POINTER,
            c_int32,
            c_int32,
        ),
    ),
    "ap_linear_pack_ggml": (
        c_int32,
        (c_void_p, POINTER(structs.LinearStruct), c_int32, _POINTER),
    ),
    "ap_linear_pack_trellis": (
        c_int32,
        (c_void_p, POINTER(structs.LinearStruct), _POINTER, _POINTER),
    ),
    "ap_trellis_encode": (
        c_int32,
        (c_void_p, c_int32, _POINTER, _POINTER, c_int32, _POINTER, _POINTER),
    ),
    "ap_page_bytes": (c_int64, (c_int32, c_int32)),
    "ap_sums": (c_int32, (_POINTER, c_int64, _POINTER)),
}


class LibraryError(Exception):
    """The CPU library cannot be used; PyTorch's kernels can."""


class LibraryMissingError(LibraryError):
    """There is no library: the package was installed without a compiler."""


class LibraryLoadError(LibraryError):
    """The file is damaged, or made for another processor or system."""


class LibraryMismatchError(LibraryError):
    """The library loads, but it is of another version, so calls would go wrong."""


class UnsupportedIsaError(LibraryError):
    """The requested instruction set is not available."""


@cache
def load_library(path: Path = LIBRARY, version: str = __version__) -> ctypes.CDLL:
    """Load the library and declare its functions; ctypes releases the GIL during a call.

    Args:
        version: of the package that the library must have been compiled for.

    Raises:
        LibraryError: it is missing, does not load, or belongs to another package.
    """
    if not path.is_file():
        raise LibraryMissingError(
            f"the CPU library was not compiled: there is no {path}; "
            f"install gcc or clang, then {_REBUILD}"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryLoadError(
            f"the CPU library does not load here ({error}); to compile it for this machine, "
            f"install gcc or clang, then {_REBUILD}"
        ) from None
    _check_identity(library, path, version)
    for name in SIGNATURES:
        _declare(library, name, path)
    return library


def _declare(library: ctypes.CDLL, name: str, path: Path) -> None:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise _mismatch(path, f"it has no {name}") from None
    function.restype, function.argtypes = SIGNATURES[name]


def _check_identity(library: ctypes.CDLL, path: Path, version: str) -> None:
    """Check the ABI first, then the version and the size of each struct."""
    _declare(library, "ap_abi", path)
    if (abi := library.ap_abi()) != structs.ABI:
        raise _mismatch(path, f"its ABI is {abi}, not {structs.ABI}")
    _declare(library, "ap_build_version", path)
    if (built := library.ap_build_version().decode()) != version:
        raise _mismatch(path, f"it is of version {built}, not {version}")
    _declare(library, "ap_struct_bytes", path)
    for name, struct in step_structs.STRUCTS.items():
        size, expected = library.ap_struct_bytes(name.encode()), ctypes.sizeof(struct)
        if size != expected:
            raise _mismatch(path, f"its {name} has {size} bytes, not {expected}")


def _mismatch(path: Path, difference: str) -> LibraryMismatchError:
    return LibraryMismatchError(
        f"the CPU library {path} does not belong to this package: {difference}; {_REBUILD}"
    )


def supported_isas(library: ctypes.CDLL) -> list[Isa]:
    """Return the instruction sets that both the library and this CPU have, slowest first."""
    return [isa for isa in Isa if library.ap_isa_supported(isa)]


def select_isa(library: ctypes.CDLL, choice: str = "auto") -> Isa:
    """Use one instruction set for all calls from now on.

    Args:
        choice: a name of `Isa` in lower case, or "auto" for the fastest available.

    Raises:
        UnsupportedIsaError: this CPU or the library does not have it.
    """
    supported = supported_isas(library)
    names = [isa.name.lower() for isa in supported]
    if choice == "auto":
        isa = supported[-1]
    elif choice in names:
        isa = supported[names.index(choice)]
    else:
        raise UnsupportedIsaError(
            f"the instruction set {choice!r} is not to be had on this machine; "
            f"it has {', '.join(names)}, and auto takes the last"
        )
    status = library.ap_use_isa(isa)
    assert status == Status.OK, f"ap_use_isa({isa!r}) returned {status}"
    return isa
