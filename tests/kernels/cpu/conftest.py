"""The CPU library under test, once per instruction set that this machine has.

APPLIANCE_TEST_CPU_LIBRARY names a library with sections to use instead of that of `cpu_sections`,
such as one with sanitizers. With APPLIANCE_TEST_CPU_CASES=N only tests that call the library run,
in N cases per function and instruction set.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernels.cpu_sections import load_sections, use_isa

from appliance.kernels.cpu.build import BuildError
from appliance.kernels.cpu.library import LibraryError, load_library, supported_isas
from appliance.kernels.cpu.structs import Isa

# Removed, because the product refuses unknown variables with its prefix.
_PATH = os.environ.pop("APPLIANCE_TEST_CPU_LIBRARY", None)
_MAX_CASES = int(os.environ.pop("APPLIANCE_TEST_CPU_CASES", "0"))


def _supported() -> list[Isa]:
    try:
        return supported_isas(load_library())
    except LibraryError:
        return [Isa.SCALAR]  # each test then fails with the reason, instead of the whole collection


@pytest.fixture
def loaded() -> Iterator[ctypes.CDLL]:
    """The library with the current instruction set, which is restored after the test."""
    try:
        library = load_sections(Path(_PATH) if _PATH else None)
    except (BuildError, LibraryError) as error:
        pytest.fail(str(error))
    before = Isa(library.ap_current_isa())
    use_isa(library, before)
    yield library
    use_isa(library, before)


@pytest.fixture(params=_supported(), ids=lambda isa: isa.name.lower())
def library(request: pytest.FixtureRequest, loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library, set to one instruction set."""
    use_isa(loaded, request.param)
    return loaded


@pytest.fixture(params=[1, 3], ids=["1thread", "3threads"])
def engine(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[int]:
    """An ap_engine of one thread, and one with more threads than this machine may have cores."""
    handle = library.ap_engine_create(request.param, 0)
    assert handle
    yield handle
    library.ap_engine_destroy(handle)


@pytest.fixture
def single(library: ctypes.CDLL) -> Iterator[int]:
    """An ap_engine of one thread."""
    handle = library.ap_engine_create(1, 0)
    yield handle
    library.ap_engine_destroy(handle)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep `_MAX_CASES` of the tests that call the library, spread over all cases of a function."""
    if not _MAX_CASES:
        return
    cases = defaultdict(list)
    for item in items:
        if "loaded" not in getattr(item, "fixturenames", ()):
            continue
        callspec = getattr(item, "callspec", None)
        isa = callspec.params.get("library") if callspec else None
        cases[item.path, getattr(item, "originalname", item.name), isa].append(item)
    kept = {
        id(group[index * (len(group) - 1) // max(1, _MAX_CASES - 1)])
        for group in cases.values()
        for index in range(_MAX_CASES)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
