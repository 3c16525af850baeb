"""Prompts by the model of waves: computed times of real linears on four cards."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.kernels.compiled_kernels.signatures.packed_matmul import MatmulShape
from support.kernels.compiled_kernels.table import load

from appliance.engine.run.measure import KERNEL_ROWS
from appliance.kernels.gpu.rates import rates_of
from appliance.kernels.gpu.residency import LARGEST
from appliance.kernels.packed_matmul.slices import (
    SLICE_BYTES,
    WIDENED_ROWS,
    LinearForm,
    choose_slices,
    dense_instructions,
    library_waves,
    loop_instructions,
    scratch_rows,
    sliced_clocks,
    widened_clocks,
)
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import ROW_STEP, TILE_N

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GOLDEN = Path(__file__).parent / f"resources_triton_{version('triton')}.json"
# RTX 3090, 4090, 5090 and H200.
CARDS = {86: replace(LARGEST[86], num_sms=82)} | {cc: LARGEST[cc] for cc in (89, 120, 90)}
# Llama 3.1 8B, Qwen3.5 27B, Qwen3 30B-A3B without its experts, which are never made dense.
LINEARS = (
    MatmulShape("8b qkv", 4096, 6144),
    MatmulShape("8b o", 4096, 4096),
    MatmulShape("8b gate_up", 4096, 28672),
    MatmulShape("8b down", 14336, 4096),
    MatmulShape("27b qkv and gate", 5120, 14336),
    MatmulShape("27b o", 6144, 5120),
    MatmulShape("27b recurrent in", 5120, 16384),
    MatmulShape("27b gate_up", 5120, 34816),
    MatmulShape("27b down", 17408, 5120),
    MatmulShape("30b qkv", 2048, 5120),
    MatmulShape("30b o", 4096, 2048),
)
# Of types of GGUF files: codes, scales, inputs of a group, bits of a weight.
FORMS = {
    "Q4_K": (Codes.INT4, Params.Q4_K, 32, 4.5),
    "Q5_K": (Codes.INT5, Params.Q4_K, 32, 5.5),
    "Q6_K": (Codes.INT6, Params.Q6_K, 16, 6.5625),
    "Q8_0": (Codes.INT8, Params.FP32, 32, 9.0),
    "Q4_0": (Codes.INT4, Params.FP16_OFFSET, 32, 5.0),
    "groups of 128": (Codes.INT4, Params.FP16_ZERO, 128, 4.25),
    "trellis of 4 bits": (Codes.TRELLIS4, Params.NONE, 0, 4.0),
}
# Looking symbols up takes longer than wgmma multiplies.
LEAST_SHARES = {("trellis of 4 bits", 90): 0.7}
ROWS = (129, 180, 256, 300, 384, 440, 512, *range(600, 4097, 173), 1024, 2048, 4096)


def form_of(shape: MatmulShape, name: str) -> LinearForm:
    kind, params_kind, group_size, bits = FORMS[name]
    return LinearForm(
        out_features=shape.out_features,
        in_features=shape.in_features,
        blocks_k=shape.in_features // 128,
        block_k=128,
        nbytes=int(shape.in_features * shape.out_features * bits / 8),
        kind=kind,
        params_kind=params_kind,
        group_size=group_size,
        gated="gate_up" in shape.name,
    )


def slices_of(form: LinearForm, rows: int, capability: int) -> tuple[int, ...]:
    return choose_slices(form, -(-rows // ROW_STEP), capability, CARDS[capability])


def clocks(form: LinearForm, rows: int, capability: int) -> float:
    """The computed time of what is chosen."""
    heights, place = slices_of(form, rows, capability), (capability, CARDS[capability])
    if heights:
        return sliced_clocks(form, rows, heights, *place)
    return widened_clocks(form, rows, *place)


def fused_clocks(shape: MatmulShape, rows: int, capability: int) -> float:
    """The computed time of 4 bits in groups of 128, widened in registers."""
    form = form_of(shape, "groups of 128")
    return widened_clocks(form, rows, capability, CARDS[capability])


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("shape", LINEARS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", FORMS)
def test_prompts_reach_nine_tenths_of_long_groups(
    capability: int, shape: MatmulShape, name: str
) -> None:
    form = form_of(shape, name)
    shares = {
        rows: fused_clocks(shape, rows, capability) / clocks(form, rows, capability)
        for rows in ROWS
    }
    least = LEAST_SHARES.get((name, capability), 0.9)
    assert min(shares.values()) >= least, min(shares.items(), key=lambda found: found[1])


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("shape", LINEARS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", FORMS)
def test_slices_are_even_and_fill_whole_waves(
    capability: int, shape: MatmulShape, name: str
) -> None:
    form, card, rates = form_of(shape, name), CARDS[capability], rates_of(capability)
    for rows in ROWS:
        heights = slices_of(form, rows, capability)
        if not heights:
            continue
        assert sum(heights) == shape.out_features
        assert max(heights) - min(heights) in (0, TILE_N)
        assert max(heights) <= scratch_rows(shape.out_features, shape.in_features)
        multiplied = sum(
            library_waves(rows, height, shape.in_features, rates, card) for height in heights
        )
        share = fused_clocks(shape, rows, capability) / multiplied
        assert share >= 0.9, (share, rows, heights)


# Slices of a fixed number of elements, as they were: for `down` seven of 576 rows and one of 64.
@pytest.mark.parametrize(("capability", "gain"), [(86, 1.1), (89, 1.8), (120, 1.15), (90, 1.5)])
def test_the_prompt_of_a_file_takes_less_than_by_slices_of_a_fixed_size(
    capability: int, gain: float
) -> None:
    form = form_of(LINEARS[3], "Q4_K")
    fixed = sliced_clocks(form, 512, (576,) * 7 + (64,), capability, CARDS[capability])
    assert fixed / clocks(form, 512, capability) >= gain


def test_the_scratch_is_bounded_whatever_the_weight() -> None:
    for shape in (*LINEARS, MatmulShape("vocabulary", 8192, 262144), MatmulShape("tiny", 64, 8)):
        nbytes = 2 * scratch_rows(shape.out_features, shape.in_features) * shape.in_features
        assert 0 < nbytes <= SLICE_BYTES + 2 * TILE_N * shape.in_features


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("model", ["8b", "27b", "30b"])
@pytest.mark.parametrize("most", [512, 2048, 4096])
def test_the_start_runs_every_kernel_of_many_rows(capability: int, model: str, most: int) -> None:
    linears = [shape for shape in LINEARS if shape.name.startswith(model)]
    run = [rows for rows in KERNEL_ROWS if WIDENED_ROWS < rows < most] + [most]
    for name in FORMS:
        forms = [form_of(shape, name) for shape in linears]
        later = kinds(forms, range(WIDENED_ROWS + 1, most, 4 * ROW_STEP), capability)
        if name == "groups of 128":  # whose tile is that of fewer rows, too
            later.discard(False)
        assert later <= kinds(forms, run, capability), name


def kinds(forms: Sequence[LinearForm], sizes: Iterable[int], capability: int) -> set[bool]:
    """Whether weights are made dense, of some linears and numbers of rows."""
    return {bool(slices_of(form, rows, capability)) for form in forms for rows in sizes}


def test_instructions_are_those_of_the_compiled_kernels() -> None:
    if not GOLDEN.exists():
        pytest.skip(f"there is no {GOLDEN.name}")
    loops = re.compile(r"packed_matmul .* (int\d) g(\d+) (\w+) bf16(?: gated)? rows (\d+)$")
    judged = 0
    for (name, _), found in load(GOLDEN).items():
        match = loops.match(name)
        if match is None or int(match[4]) < (128 if match[2] == "128" else 512):
            continue
        form = replace(
            form_of(LINEARS[0], "Q4_K"),
            kind=Codes(match[1]),
            group_size=int(match[2]),
            params_kind=Params(match[3]),
        )
        each = sum(found["loop"].values()) / found["loop_elements"]
        assert 0.89 <= loop_instructions(form) / each <= 1.35, (name, each)
        judged += 1
    assert judged > 10
    table = load(GOLDEN)
    for name, key, weights in (
        ("Q4_K", "packed_matmul rows Q4_K bf16", 16 * 128),
        ("Q6_K", "packed_matmul rows Q6_K bf16", 16 * 128),
        ("Q4_0", "packed_matmul dequantize int4 g32 bf16", 64 * 128),
        ("Q8_0", "packed_matmul dequantize int8 g32 bf16", 64 * 128),
    ):
        each = 4 * table[key, 86]["instructions"] / weights
        assert 0.98 <= dense_instructions(form_of(LINEARS[0], name)) / each <= 1.3, (name, each)
