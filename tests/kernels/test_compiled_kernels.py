"""Every shipped kernel is compiled for every architecture, with no GPU, and its code is gated."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from aot_process import compile_kernels
from decode_gates import LIMITS, Loop, moves_codes, per_element, too_many
from ptx_machine.driver import SHARED_LIMIT

from appliance.kernels.paged_attention.spec import LLAMA
from appliance.kernels.signature import CAPABILITIES, SPECS

HERE = Path(__file__).parent
GOLDEN = HERE / "resources_triton_3.7.1.json"
REGISTER_LIMIT = 255

Table = dict[tuple[str, int], dict[str, Any]]
Gate = Callable[[Table], Collection[object]]  # what offends


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # the first test compiles everything
]


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """All kernels' resources, planted regressions included, by name and capability."""
    output = tmp_path_factory.mktemp("aot") / "resources.json"
    compile_kernels(pytestconfig.rootpath, output, [*SPECS, "planted_regressions"])
    return load(output)


def load(path: Path) -> Table:
    kernels = json.loads(path.read_text())["kernels"]
    return {(name, int(cc)): found for name, row in kernels.items() for cc, found in row.items()}


def shipped(table: Table) -> Table:
    return {key: found for key, found in table.items() if not key[0].startswith("planted")}


def attention(table: Table) -> Table:
    return {key: found for key, found in table.items() if key[0].startswith("attention")}


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
    # The first three have no such tiles; the last has pages smaller than what threads could load.
    others = re.compile(r"spans|kv_seal|token mask|attention prefill .* kv int4")
    return [
        key for key, found in table.items() if found["wide_loads"] < 2 and not others.match(key[0])
    ]


def matmuls(table: Table, kind: str) -> Table:
    """Those that multiply: not what prepares their operands."""
    return {
        key: found
        for key, found in table.items()
        if re.search(rf"{kind}_matmul.* \w+ \d+$", key[0])
    }


def multiplying_otherwise(table: Table) -> Collection[object]:
    """Matmuls on other tensor core instructions than the best that their architecture has."""
    wrong = [
        key
        for key, found in matmuls(table, "fp8").items()
        if found["matrix_kinds"] != ["QGMMA" if key[1] == 90 else "QMMA"]
    ]
    for key, found in matmuls(table, "packed").items():
        # Few rows are left to two warps, which are too few for those of a warpgroup.
        warpgroup = key[1] == 90 and not key[0].endswith(("rows 8", "rows 16"))
        if found["matrix_kinds"] != ["HGMMA" if warpgroup else "HMMA"]:
            wrong.append(key)
    return wrong


# Of converting numbers, of moving weights between lanes, and of taking them through memory.
DETOURS = {"I2F", "I2FP", "F2F", "SHFL", "STS", "STSM", "STL", "LDL", "MUFU"}


def taking_detours(table: Table) -> Collection[object]:
    """Matmuls of packed weights that do more in their loop than load, widen and multiply."""
    return [
        key for key, found in matmuls(table, "packed").items() if DETOURS & found["loop"].keys()
    ]


# Instructions per weight and lane in the hot loop, by codes, group and rows of x.
MOST_INSTRUCTIONS = {
    ("int4", "g128", 8): 2.6,
    ("int4", "g128", 16): 3.0,
    ("int4", "g128", 32): 3.5,
    ("int4", "g32", 8): 3.7,
    ("int4", "g32", 16): 4.6,
    ("int8", "g32", 8): 3.4,
    ("int8", "g32", 16): 3.9,
    ("fp8", "per channel", 8): 3.1,
    ("fp8", "per channel", 16): 3.3,
}


def widening_slowly(table: Table) -> Collection[object]:
    """Matmuls of packed weights with more instructions per weight than the limit."""
    slow = []
    for key, found in matmuls(table, "packed").items():
        match = re.search(r"(int4|int8|fp8) (g\d+|per channel) .*rows (\d+)$", key[0])
        assert match
        limit = MOST_INSTRUCTIONS.get((match[1], match[2], int(match[3])))
        each = sum(found["loop"].values()) / found["loop_elements"]
        if limit is not None and each > limit:
            slow.append(key)
    return slow


def test_all_signatures_compile(compiled: Table) -> None:
    expected = {
        (signature.name, capability)
        for capability in CAPABILITIES
        for spec in SPECS
        for signature in importlib.import_module(spec).signatures(capability)
    }
    assert set(shipped(compiled)) == expected
    assert {capability for _, capability in expected} == {80, 86, 89, 90, 120}


@pytest.mark.parametrize(
    "offending",
    [
        spilling,
        too_large,
        without_tensor_cores,
        without_wide_loads,
        multiplying_otherwise,
        taking_detours,
        widening_slowly,
    ],
)
def test_no_kernel_is(compiled: Table, offending: Gate) -> None:
    assert not offending(shipped(compiled))


def test_prefill_takes_the_warpgroup_products_of_hopper(compiled: Table) -> None:
    # Their 64 rows would leave too few registers for this one.
    other = "attention prefill gemma3_270m bf16 kv int4-sealed"
    kinds = {
        key: found["matrix_kinds"]
        for key, found in compiled.items()
        if key[1] == 90 and key[0].startswith("attention prefill") and key[0] != other
    }
    assert kinds
    assert all(kind == ["HGMMA"] for kind in kinds.values()), kinds


@pytest.mark.parametrize(
    ("regression", "offending"),
    [
        ("planted: too few registers", spilling),
        ("planted: no promise of alignment", without_wide_loads),
        ("planted: too much shared memory", too_large),
        ("planted packed_matmul: another order of codes, int4 g128 fp32 rows 8", taking_detours),
        ("planted packed_matmul: another order of codes, int4 g128 fp32 rows 8", widening_slowly),
        (
            "planted packed_matmul: warps that share weights, int4 g128 fp32 rows 128",
            taking_detours,
        ),
        ("planted packed_matmul: no promise of alignment, int4 g128 rows 8", without_wide_loads),
    ],
)
def test_gates_catch_planted_regressions(compiled: Table, regression: str, offending: Gate) -> None:
    key = (regression, 86)
    assert key in offending({key: compiled[key]})


def decode_loop(table: Table, kv_format: str, capability: int) -> Loop:
    loop: Loop = table[f"attention decode {LLAMA.name} bf16 kv {kv_format}", capability]["loop"]
    return loop


@pytest.mark.parametrize("kv_format", list(LIMITS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_an_element_takes_few_instructions(
    compiled: Table, kv_format: str, capability: int
) -> None:
    loop = decode_loop(compiled, kv_format, capability)
    assert loop["HMMA"], loop
    assert not too_many(kv_format, capability, loop), (per_element(kv_format, loop), loop)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4", "int4-sealed"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_codes_stay_in_the_registers_they_arrive_in(
    compiled: Table, kv_format: str, capability: int
) -> None:
    loop = decode_loop(compiled, kv_format, capability)
    assert not moves_codes(loop), loop


@pytest.mark.parametrize(
    ("regression", "offends"),
    [
        ("codes by cast", lambda loop: too_many("int8", 86, loop)),
        ("codes by cast", moves_codes),
        ("another order of codes", moves_codes),
    ],
)
def test_gates_of_decode_catch_planted_regressions(
    compiled: Table, regression: str, offends: Callable[[Loop], bool]
) -> None:
    assert offends(compiled[f"planted decode: {regression}", 86]["loop"])


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


def test_hot_loops_stay_within_a_twentieth_of_the_golden_table(compiled: Table) -> None:
    if version("triton") != "3.7.1":
        pytest.skip(f"the golden table is of triton 3.7.1, this is {version('triton')}")
    golden = load(GOLDEN)
    loops = {
        key: (sum(found["loop"].values()), sum(golden[key]["loop"].values()))
        for key, found in shipped(compiled).items()
    }
    wrong = {key: pair for key, pair in loops.items() if pair[0] > 1.05 * pair[1]}
    assert not wrong, f"(found, golden): {wrong}"
