"""Every shipped kernel is compiled for every architecture, without a GPU, and gates judge its code.

Tables store what each triton made of them, in rows with digests of their sources;
`scripts/check_triton` compiles the rows that changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.kernels.compiled_kernels.compile import beside_products
from support.kernels.compiled_kernels.decode_gates import Loop, moves_codes, too_many
from support.kernels.compiled_kernels.gates import (
    GATES,
    Gate,
    costly_latents,
    costly_parts,
    multiplies_e4m3,
    multiplying_int8_slowly,
    multiplying_otherwise,
    offenders,
    pausing_products,
    sharing_rows,
    shipped,
    spilling,
    taking_detours,
    too_large,
    widening_slowly,
    without_wide_loads,
)
from support.kernels.compiled_kernels.signatures.paged_attention import IN_PARTS
from support.kernels.compiled_kernels.table import (
    ORDERS,
    RESOURCES,
    Kind,
    Table,
    every_signature,
    load,
    save,
    stale,
)
from support.runs.turns import sample, seed_of_tree

HERE = Path(__file__).parent
ONE_IN = 160  # one row in so many is compiled in each run; each commit has another sample
TABLES = {path.stem.rpartition("_")[2]: load(path) for path in HERE.glob("resources_triton_*.json")}


@pytest.fixture(params=sorted(TABLES), scope="module")
def triton(request: pytest.FixtureRequest) -> str:
    """A triton version that has a table."""
    return str(request.param)


@pytest.fixture
def table(triton: str) -> Table:
    return TABLES[triton]


def test_the_oldest_supported_compiler_has_a_table_and_the_installed_one() -> None:
    assert TABLES.keys() >= {"3.6.0", version("triton")}


def test_each_row_is_of_what_the_kernels_are_now(table: Table, triton: str) -> None:
    old = stale(table, triton)
    assert not old, (
        f"{len(old)} rows, such as {old[0]}: run scripts/check_triton, read what changed"
    )


def test_each_signature_has_a_row_and_each_row_a_signature(table: Table) -> None:
    assert table.keys() == every_signature().keys()
    assert {capability for _, capability in shipped(table)} == {80, 86, 89, 90, 120}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", [RESOURCES, ORDERS], ids=lambda kind: kind.name)
def test_a_sample_that_is_compiled_is_as_stored_but_for_what_is_planted(
    pytestconfig: pytest.Config, tmp_path: Path, kind: Kind
) -> None:
    triton = version("triton")
    name = f"{kind.name}_triton_{triton}.json"
    table = load(HERE / name)
    one, *_ = sample(list(kind.signatures()), ONE_IN, seed_of_tree())
    table[one] = {**table[one], "planted": 1}
    save(tmp_path / name, table, triton)

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.rootpath / ".cache" / "triton")
    path = os.pathsep.join(filter(None, (str(HERE.parent / "support"), os.getenv("PYTHONPATH"))))
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "support.kernels.compiled_kernels",
            tmp_path / name,
            "--check",
            str(ONE_IN),
        ],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1, finished.stderr
    summary, *differing = finished.stdout.splitlines()
    assert summary.endswith("rows compiled, 0 stale, 1 differ"), finished.stdout
    assert differing == [f"  {one[0]}, {one[1]}"]


@pytest.mark.parametrize("offending", GATES)
def test_no_kernel_is(table: Table, triton: str, offending: Gate) -> None:
    assert not offenders(offending, table, triton)


def test_prefill_takes_the_warpgroup_products_of_hopper(table: Table) -> None:
    # wgmma's 64 rows would leave too few registers to the first two; nor does it multiply divided
    # heads.
    others = (
        "attention prefill gemma3_270m bf16 kv int4-sealed",
        "attention prefill gemma3_4b pictures in windows bf16 kv int4-sealed",
        f"attention prefill {IN_PARTS.name}",
    )
    kinds = {
        key: found["matrix_kinds"]
        for key, found in table.items()
        if key[1] == 90 and key[0].startswith("attention prefill") and not key[0].startswith(others)
    }
    assert kinds
    for key, kind in kinds.items():
        assert kind == ["QGMMA" if multiplies_e4m3(key) else "HGMMA"], key


# Instructions per page by mma.sync and by wgmma. Codes that the hardware widens took 475 and 325.
# Triton 3.6 reads the codes from shared memory byte by byte.
E4M3_PAGE = {"3.7.1": (310, 270), "3.6.0": (400, 365)}


def test_codes_of_fp8_pages_are_multiplied_as_they_are(table: Table, triton: str) -> None:
    name, limits = "attention prefill llama_8b bf16 kv fp8", E4M3_PAGE[triton]
    widened = table[name, 86]["loop"]
    for capability in (89, 120):
        found = table[name, capability]
        assert found["matrix_kinds"] == ["QMMA"]
        assert found["loop"]["QMMA"] == 32 == widened["HMMA"] // 2
        assert sum(found["loop"].values()) < limits[0]
    hopper = table[name, 90]
    assert hopper["matrix_kinds"] == ["QGMMA"]
    assert sum(hopper["loop"].values()) < limits[1]


@pytest.mark.parametrize(
    ("regression", "offending"),
    [
        ("planted: too few registers", spilling),
        ("planted: no promise of alignment", without_wide_loads),
        ("planted: too much shared memory", too_large),
        ("planted prefill: fewer rows than dimensions, bf16 kv int8", sharing_rows),
        ("planted packed_matmul: another order of codes, int4 g128 fp32 rows 8", taking_detours),
        ("planted packed_matmul: another order of codes, int4 g128 fp32 rows 8", widening_slowly),
        (
            "planted packed_matmul: warps that share weights, int4 g128 fp32 rows 128",
            taking_detours,
        ),
        (
            "planted packed_matmul: warps that share weights, int4 g128 fp32 rows 128",
            pausing_products,
        ),
        ("planted packed_matmul: no promise of alignment, int4 g128 rows 8", without_wide_loads),
    ],
)
def test_gates_catch_planted_regressions(table: Table, regression: str, offending: Gate) -> None:
    key = (regression, 86)
    assert key in offending({key: table[key]})


@pytest.mark.parametrize(
    ("loop", "beside"),
    [
        ("LOP3 HMMA.16816 PRMT FFMA HMMA.16816 BAR.SYNC", "PRMT FFMA"),
        ("LOP3 HMMA.16816 PRMT", ""),
        ("LOP3 PRMT", ""),
        ("LOP3 HGMMA.64 PRMT WARPGROUP.DEPBAR.LE FFMA", "PRMT"),
        # In flight until the next iteration.
        ("LOP3 WARPGROUP.DEPBAR.LE SHF HGMMA.64 PRMT", "LOP3 PRMT"),
    ],
)
def test_what_is_issued_beside_products(loop: str, beside: str) -> None:
    assert beside_products(loop.split()) == beside.split()


def test_a_warpgroup_without_another_program_is_caught(table: Table) -> None:
    key = ("planted packed_matmul: one program, int4 g128 fp32 rows 128", 90)
    assert pausing_products({key: table[key]}) == [key]


@pytest.mark.parametrize(
    ("regression", "offends"),
    [
        ("codes by cast", lambda loop: too_many("int8", 86, loop)),
        ("codes by cast", moves_codes),
        ("another order of codes", moves_codes),
    ],
)
def test_gates_of_decode_catch_planted_regressions(
    table: Table, regression: str, offends: Callable[[Loop], bool]
) -> None:
    assert offends(table[f"planted decode: {regression}", 86]["loop"])


def test_a_longer_loop_over_heads_in_parts_is_caught(table: Table) -> None:
    key = (f"attention decode {IN_PARTS.name} bf16 kv int8", 86)
    found = table[key]
    longer = {**found["loop"], "FFMA": found["loop_elements"]}
    assert not costly_parts({key: found})
    assert costly_parts({key: {**found, "loop": longer}}) == [("int8", 86)]


def test_an_int8_matmul_that_multiplies_otherwise_or_slowly_is_caught(table: Table) -> None:
    key = ("int8_matmul llama_8b gate_up int4 g128 fp16_zero bf16 rows 512", 86)
    found = table[key]
    for gate, change in (
        (multiplying_otherwise, {"matrix_kinds": ["HMMA", "IMMA"]}),
        (taking_detours, {"loop": {**found["loop"], "I2F": 1}}),
        (multiplying_int8_slowly, {"loop": {**found["loop"], "FMUL": 4 * found["loop_elements"]}}),
    ):
        assert not gate({key: found})
        assert gate({key: {**found, **change}}) == [key]


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_latents_that_pass_by_registers_and_a_longer_loop_are_caught(
    table: Table, kv_format: str
) -> None:
    key = (f"latent_attention decode deepseek_v2_lite bf16 kv {kv_format}", 86)
    found = table[key]
    assert not costly_latents({key: found})
    for more in {"LDG": 1}, {"FFMA": found["loop_elements"]}:
        assert costly_latents({key: {**found, "loop": found["loop"] | more}}) == [key]
