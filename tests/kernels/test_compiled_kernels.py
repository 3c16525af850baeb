"""Every shipped kernel is compiled for every architecture, with no GPU, and its code is gated."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from compiled_kernels.decode_gates import Loop, moves_codes, too_many
from compiled_kernels.gates import (
    GATES,
    Gate,
    Table,
    load,
    offenders,
    shipped,
    spilling,
    taking_detours,
    too_large,
    widening_slowly,
    without_wide_loads,
)
from compiled_kernels.process import compile_kernels
from compiled_kernels.signature import CAPABILITIES
from compiled_kernels.signatures import signatures

HERE = Path(__file__).parent
GOLDEN = HERE / f"resources_triton_{version('triton')}.json"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # the first test compiles everything
]


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """All kernels' resources, planted regressions included, by name and capability."""
    output = tmp_path_factory.mktemp("aot") / "resources.json"
    compile_kernels(pytestconfig.rootpath, output)
    return load(output)


def golden_table() -> Table:
    if not GOLDEN.exists():
        pytest.skip(f"there is no {GOLDEN.name}; `scripts/check_triton` makes one")
    return load(GOLDEN)


def test_all_signatures_compile(compiled: Table) -> None:
    expected = {
        (signature.name, capability)
        for capability in CAPABILITIES
        for signature in signatures(capability)
    }
    assert set(shipped(compiled)) == expected
    assert {capability for _, capability in expected} == {80, 86, 89, 90, 120}


@pytest.mark.parametrize("offending", GATES)
def test_no_kernel_is(compiled: Table, offending: Gate) -> None:
    assert not offenders(offending, compiled, version("triton"))


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
    """The page on extending says how to rewrite it."""
    golden = golden_table()
    assert set(golden) == set(shipped(compiled))
    wrong = {
        (*key, what): (found[what], golden[key][what])
        for key, found in shipped(compiled).items()
        for what in ("registers", "shared", "instructions", "wide_loads")
        if abs(found[what] - golden[key][what]) > 0.1 * golden[key][what]
    }
    assert not wrong, f"(found, golden): {wrong}"


def test_hot_loops_stay_within_a_twentieth_of_the_golden_table(compiled: Table) -> None:
    golden = golden_table()
    loops = {
        key: (sum(found["loop"].values()), sum(golden[key]["loop"].values()))
        for key, found in shipped(compiled).items()
    }
    wrong = {key: pair for key, pair in loops.items() if pair[0] > 1.05 * pair[1]}
    assert not wrong, f"(found, golden): {wrong}"
