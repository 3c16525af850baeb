"""The order of machine code, which the machine that executes PTX does not see, by both assemblers.

Tables store what each triton's assemblers made of the kernels that start early or multiply by
warpgroups; `scripts/check_triton` compiles the rows that changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from support.kernels.compiled_kernels.listing import Listing, read
from support.kernels.compiled_kernels.order import (
    overwritten_operands,
    products_of_registers,
    too_early,
)
from support.kernels.compiled_kernels.order_gates import (
    KNOWN,
    ORDER_GATES,
    OrderGate,
    codes,
    never_waiting,
    offenders,
    overwriting_operands,
    spilling,
    spilling_much,
    starting_too_early,
    too_large,
)
from support.kernels.compiled_kernels.signatures.packed_matmul import (
    MatmulCase,
    chosen_tiles,
)
from support.kernels.compiled_kernels.table import (
    ORDERS,
    Table,
    every_ordered,
    is_early,
    load,
    stale,
)

from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import choose_tile
from appliance.kernels.packed_matmul.variant import may_fold

HERE = Path(__file__).parent
TABLES = {path.stem.rpartition("_")[2]: load(path) for path in HERE.glob("orders_triton_*.json")}


@pytest.fixture(params=sorted(TABLES), scope="module")
def triton(request: pytest.FixtureRequest) -> str:
    """A triton version that has a table."""
    return str(request.param)


@pytest.fixture
def table(triton: str) -> Table:
    return TABLES[triton]


def listing_of(*lines: str) -> Listing:
    """Instructions and labels as nvdisasm writes them."""
    return read(
        "".join(
            f"{line}\n" if line.startswith(".L") else f"        /*{16 * i:04x}*/    {line} ;\n"
            for i, line in enumerate(lines)
        )
    )


def test_tables_are_of_what_the_kernels_are_now(table: Table, triton: str) -> None:
    assert version("triton") in TABLES
    old = stale(table, triton, ORDERS)
    assert not old, (
        f"{len(old)} rows, such as {old[0]}: run scripts/check_triton, read what changed"
    )
    assert table.keys() == every_ordered().keys()


@pytest.mark.parametrize("gate", ORDER_GATES)
def test_no_kernel_is(table: Table, triton: str, gate: OrderGate) -> None:
    assert not offenders(gate, table, triton)


def test_known_faults_are_still_there_and_small(table: Table, triton: str) -> None:
    by_case = dict(codes(table))
    for case in KNOWN.get((triton, spilling), ()):
        assert 0 < by_case[case]["stack"] <= 8, case


def test_both_assemblers_judge_the_architecture_that_both_can_target(table: Table) -> None:
    # Triton's PTX for the newest architecture is of a version that the older assembler refuses.
    found = {
        capability: {assembler for (_, cc, assembler), _ in codes(table) if cc == capability}
        for capability in (90, 120)
    }
    assert found == {90: {"ptxas", "ptxas-blackwell"}, 120: {"ptxas-blackwell"}}


@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_that_waits_for_the_one_before_is_judged_early(capability: int) -> None:
    waiting = {
        function.name
        for path in (HERE.parents[1] / "kernels").glob("*/*kernel.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and "wait_for_previous()" in ast.unparse(function)
    }
    assert len(waiting) >= 4
    assert waiting == {
        signature.function
        for (name, cc), signature in every_ordered().items()
        if cc == capability and is_early(signature) and not name.startswith("planted")
    }


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(Codes.INT4, 128, Params.FP16_ZERO),
        MatmulCase(Codes.INT8, 128, Params.FP32),
        MatmulCase(Codes.INT8, 0, Params.NONE),
        MatmulCase(Codes.INT4, 32, Params.FP16_OFFSET),
    ],
)
def test_all_rows_have_a_tile_among_those_judged(case: MatmulCase, capability: int) -> None:
    judged = {replace(tile, max_rows=0) for tile in chosen_tiles(case, capability)}
    for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 4096):
        folds = may_fold(case.kind, case.group_size)
        tile = choose_tile(rows, capability, case.group_size, may_fold=folds)
        assert replace(tile, max_rows=0) in judged


def test_a_table_has_products_of_registers_and_waits(table: Table) -> None:
    kept = {case: code for case, code in codes(table) if not case[0].startswith("planted")}
    assert sum(code["operands"] for code in kept.values()) > 1000
    assert sum(code["waits"] for code in kept.values()) > 200


PRODUCTS = (
    "WARPGROUP.ARRIVE",
    "HGMMA.64x64x16.F32.BF16 R56, R132, gdesc[UR16], RZ, !UPT",
    "HGMMA.64x64x16.F32.BF16 R56, R136, gdesc[UR28], R56, gsb0",
)


@pytest.mark.parametrize(
    "writer",
    [
        "MOV R139, RZ",
        "LDS.128 R136, [R4+0x10]",
        "LDSM.16.M88.4 R132, [R4]",
        "@!P0 LDG.E R135, desc[UR6][R2.64]",
        "IMAD.WIDE R138, R4, 0x4, R6",
        "SHFL.BFLY PT, R132, R4, 0x1, 0x1f",
        "LOP3.LUT R137, R139, 0xf, RZ, 0xc0, !PT",
        "HGMMA.64x64x16.F32.BF16 R104, R140, gdesc[UR16], R104",
    ],
)
def test_a_write_to_an_operand_in_flight_is_found(writer: str) -> None:
    found = overwritten_operands(listing_of(*PRODUCTS, writer, "WARPGROUP.DEPBAR.LE gsb0, 0x0"))
    assert found
    assert all(text.endswith(f"<- {writer.removeprefix('@!P0 ')}") for text in found)


@pytest.mark.parametrize(
    "beside",
    [
        "MOV R140, R132",
        "STS.128 [R4], R132",
        "STG.E.128 desc[UR6][R132.64], R136",
        "ISETP.GE.AND P0, PT, R132, 0x1, PT",
        "LDGSTS.E.BYPASS.128 [R133], desc[UR6][R134.64]",
        "LDC R131, c[0x0][0x28]",
        "R2UR UR4, R132",
    ],
)
def test_other_instructions_beside_products_are_not(beside: str) -> None:
    waited = listing_of(*PRODUCTS, beside, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R132, RZ")
    assert products_of_registers(waited.code) == 2
    assert overwritten_operands(waited) == []


def test_a_wait_that_leaves_a_group_in_flight_leaves_its_operands() -> None:
    later = (
        "HGMMA.64x64x16.F32.BF16 R24, R140, gdesc[UR16], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    )
    assert overwritten_operands(listing_of(*PRODUCTS, *later, "MOV R132, RZ", "MOV R139, RZ")) == []
    assert len(overwritten_operands(listing_of(*PRODUCTS, *later, "MOV R140, RZ"))) == 1
    # A wait that only some threads make is none.
    some = listing_of(*PRODUCTS, "@P0 WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R132, RZ")
    assert len(overwritten_operands(some)) == 1


def test_a_write_in_the_next_iteration_and_on_one_of_two_branches_is_found() -> None:
    loop = listing_of(
        ".L_x_0:", "MOV R133, R4", *PRODUCTS, "@P1 BRA `(.L_x_0)",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT",
    )  # fmt: skip
    assert overwritten_operands(loop) == [
        "HGMMA.64x64x16.F32.BF16 R56, R132, gdesc[UR16], RZ, !UPT <- MOV R133, R4"
    ]
    branch = (
        *PRODUCTS, "@P0 BRA `(.L_x_1)", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BRA `(.L_x_2)",
        ".L_x_1:", "{}", ".L_x_2:", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT",
    )  # fmt: skip
    for text, count in (("MOV R132, RZ", 1), ("MOV R140, RZ", 0)):
        assert len(overwritten_operands(listing_of(*(x.format(text) for x in branch)))) == count


@pytest.mark.parametrize(
    "access",
    [
        "LDG.E.128 R4, desc[UR6][R2.64]",
        "@P0 LD.E R4, [R2.64]",
        "LDGSTS.E.BYPASS.128 [R4], desc[UR6][R2.64]",
        "STG.E desc[UR6][R2.64], R4",
        "RED.E.ADD.STRONG.GPU desc[UR6][R2.64], R4",
        "ATOMG.E.EXCH.STRONG.GPU PT, R4, desc[UR6][R2.64], R5",
        "UBLKCP.S.G [UR4], [UR6], UR8",
        "UTMALDG.2D [UR4], [UR6]",
        "PREEXIT",
        "@P0 EXIT",
    ],
)
def test_what_stands_before_the_wait_on_some_path_is_found(access: str) -> None:
    plain = access.removeprefix("@P0 ")
    assert too_early(listing_of(access, "ACQBULK", "EXIT")) == [plain]
    jumped = ("@P1 BRA `(.L_x_0)", "ACQBULK", ".L_x_0:", access, "EXIT")
    assert plain in too_early(listing_of(*jumped))
    assert too_early(listing_of("ACQBULK", access, "EXIT")) == []
    # A branch that comes back to the wait, with an access that is listed before it.
    around = ("BRA `(.L_x_1)", ".L_x_0:", access, "EXIT", ".L_x_1:", "ACQBULK", "BRA `(.L_x_0)")
    assert too_early(listing_of(*around)) == []


@pytest.mark.parametrize(
    "harmless",
    [
        "LDC R1, c[0x0][0x28]",
        "ULDC.64 UR6, c[0x0][0x208]",
        "STS [R4], R5",
        "LDS R5, [R4]",
        "CCTL.E.PF2 [R2]",
        "S2R R0, SR_TID.X",
    ],
)
def test_what_touches_no_memory_of_others_may_stand_before_the_wait(harmless: str) -> None:
    assert too_early(listing_of(harmless, "ACQBULK", "EXIT")) == []


@pytest.mark.parametrize(
    ("fault", "gate"),
    [
        ("loads", starting_too_early),
        ("adds", starting_too_early),
        ("starts the next", starting_too_early),
        ("never waits", never_waiting),
    ],
)
def test_planted_kernels_are_caught_in_machine_code(
    table: Table, fault: str, gate: OrderGate
) -> None:
    for capability in (90, 120):
        key = (f"planted early: {fault}", capability)
        cases = {case for case, _ in codes({key: table[key]})}
        assert set(gate({key: table[key]})) == cases


@pytest.mark.parametrize(
    ("change", "assembler", "gate"),
    [
        ({"stack": 8}, "ptxas", spilling),
        ({"stack": 168}, "ptxas-blackwell", spilling_much),
        ({"registers": 256}, "ptxas-blackwell", too_large),
        ({"overwritten": ["HGMMA <- MOV"]}, "ptxas-blackwell", overwriting_operands),
        ({"waits": 0}, "ptxas-blackwell", never_waiting),
    ],
)
def test_gates_find_one_assemblers_fault(
    table: Table, change: dict[str, object], assembler: str, gate: Callable[[Table], object]
) -> None:
    key = next(key for key in table if " early rows" in key[0] and key[1] == 90)
    row = {**table[key], assembler: {**table[key][assembler], **change}}
    assert gate({key: row}) == [(*key, assembler)]
