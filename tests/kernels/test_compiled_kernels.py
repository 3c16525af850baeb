"""Every shipped kernel is compiled for every architecture, with no GPU, and its code is gated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from appliance.kernels.kv_write.spec import signatures as kv_write_signatures
from appliance.kernels.paged_attention.spec import signatures as attention_signatures
from appliance.kernels.signature import CAPABILITIES

HERE = Path(__file__).parent
GOLDEN = HERE / "resources_triton_3.7.1.json"
SPECS = ("appliance.kernels.paged_attention.spec", "appliance.kernels.kv_write.spec")
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KiB that one program can have
REGISTER_LIMIT = 255

Table = dict[tuple[str, int], dict[str, Any]]
Gate = Callable[[Table], Collection[object]]  # what offends


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """All kernels' resources, planted regressions included, by name and capability."""
    output = tmp_path_factory.mktemp("aot") / "resources.json"
    # Another process, because one that has imported an interpreting triton cannot compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.rootpath / ".cache" / "triton")
    path = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
    specs = ["--spec", *SPECS, "planted_regressions"]
    finished = subprocess.run(
        [sys.executable, "-m", "appliance.kernels.aot", str(output), *specs],
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    return load(output)


def load(path: Path) -> Table:
    kernels = json.loads(path.read_text())["kernels"]
    return {(name, int(cc)): found for name, row in kernels.items() for cc, found in row.items()}


def shipped(table: Table) -> Table:
    return {key: found for key, found in table.items() if not key[0].startswith("planted")}


def attention(table: Table) -> Table:
    return {key: found for key, found in table.items() if not key[0].startswith(("kv_w", "merge"))}


def spilling(table: Table) -> Collection[object]:
    return [key for key, found in table.items() if found["stack"] or found["spills"]]


def too_large(table: Table) -> Collection[object]:
    return [
        key
        for key, found in table.items()
        if found["shared"] > SHARED_LIMIT[key[1]] * 1024 or found["registers"] > REGISTER_LIMIT
    ]


def without_tensor_cores(table: Table) -> Collection[object]:
    return [
        key
        for key, found in attention(table).items()
        if not found["matrix_products"] or not set(found["matrix_kinds"]) <= {"HMMA", "HGMMA"}
    ]


def without_wide_loads(table: Table) -> Collection[object]:
    """Those that do not load at least a tile of keys and one of values 16 bytes at a time."""
    return [key for key, found in table.items() if found["wide_loads"] < 2]


def test_all_signatures_compile(compiled: Table) -> None:
    expected = {
        (signature.name, capability)
        for capability in CAPABILITIES
        for signatures in (attention_signatures, kv_write_signatures)
        for signature in signatures(capability)
    }
    assert set(shipped(compiled)) == expected
    assert {capability for _, capability in expected} == {80, 86, 89, 90, 120}


@pytest.mark.parametrize(
    "offending", [spilling, too_large, without_tensor_cores, without_wide_loads]
)
def test_no_kernel_is(compiled: Table, offending: Gate) -> None:
    assert not offending(shipped(compiled))


def test_prefill_takes_the_warpgroup_products_of_hopper(compiled: Table) -> None:
    kinds = {
        key: found["matrix_kinds"]
        for key, found in compiled.items()
        if key[1] == 90 and key[0].startswith("attention prefill")
    }
    assert kinds
    assert all(kind == ["HGMMA"] for kind in kinds.values()), kinds


@pytest.mark.parametrize(
    ("regression", "offending"),
    [
        ("planted: too few registers", spilling),
        ("planted: no promise of alignment", without_wide_loads),
        ("planted: too much shared memory", too_large),
    ],
)
def test_gates_catch_planted_regressions(compiled: Table, regression: str, offending: Gate) -> None:
    key = (regression, 86)
    assert key in offending({key: compiled[key]})


def test_resources_stay_within_a_tenth_of_the_golden_table(compiled: Table) -> None:
    """`python -m appliance.kernels.aot tests/kernels/resources_triton_3.7.1.json` rewrites it."""
    if version("triton") != "3.7.1":
        pytest.skip(f"the golden table is of triton 3.7.1, this is {version('triton')}")
    golden = load(GOLDEN)
    assert set(golden) == set(shipped(compiled))
    wrong = {
        (*key, what): (found[what], golden[key][what])
        for key, found in shipped(compiled).items()
        for what in ("registers", "shared", "instructions", "wide_loads")
        if abs(found[what] - golden[key][what]) > 0.1 * golden[key][what]
    }
    assert not wrong, f"(found, golden): {wrong}"
