"""The hot loop of decode, counted: what it costs to read an element of a key or a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from aot_process import compile_kernels

from appliance.kernels.paged_attention.spec import LLAMA
from appliance.kernels.signature import CAPABILITIES

# Instructions per element, lane and warp: 5 % above what was found. Without the conversion that
# the hardware has from 8.9 on, E4M3 takes twice as many.
LIMITS = {"bf16": 2.9, "fp8": 2.2, "int8": 2.8, "int4": 3.15, "int4-sealed": 3.25}
FP8_BITS_LIMIT = 4.0
ELEMENTS = 2 * 32 * LLAMA.head_dim  # of a page
WARPS = {"bf16": 2}  # else one
# The softmax takes 4 shuffles for a maximum, and as many for each of one or two sums.
SHUFFLES = 12
SHARED_LOADS = 34  # 16 bytes of codes each, and the scales

Loop = dict[str, int]  # opcode, instructions
Loops = dict[tuple[str, int], Loop]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # the first test compiles everything
]


@pytest.fixture(scope="module")
def loops(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    output = tmp_path_factory.mktemp("aot") / "decode.json"
    kernels = compile_kernels(pytestconfig.rootpath, output, ["decode_gates"])
    return {
        (name, int(capability)): found["loop"]
        for name, row in kernels.items()
        for capability, found in row.items()
    }


def per_element(kv_format: str, loop: Loop) -> float:
    return sum(loop.values()) * 32 * WARPS.get(kv_format, 1) / ELEMENTS


def too_many(kv_format: str, capability: int, loop: Loop) -> bool:
    by_bits = kv_format == "fp8" and capability < 89
    return per_element(kv_format, loop) > (FP8_BITS_LIMIT if by_bits else LIMITS[kv_format])


def moves_codes(loop: Loop) -> bool:
    """Whether codes are converted one by one, or cross lanes or go back to shared memory."""
    detours = sum(count for code, count in loop.items() if code.startswith(("I2F", "STS")))
    return bool(detours or loop.get("SHFL", 0) > SHUFFLES or loop.get("LDS", 0) > SHARED_LOADS)


@pytest.mark.parametrize("kv_format", list(LIMITS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_an_element_takes_few_instructions(loops: Loops, kv_format: str, capability: int) -> None:
    loop = loops[kv_format, capability]
    assert loop["HMMA"], loop
    assert not too_many(kv_format, capability, loop), (per_element(kv_format, loop), loop)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4", "int4-sealed"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_codes_stay_in_the_registers_they_arrive_in(
    loops: Loops, kv_format: str, capability: int
) -> None:
    assert not moves_codes(loops[kv_format, capability]), loops[kv_format, capability]


@pytest.mark.parametrize(
    ("regression", "offends"),
    [
        ("codes by cast", lambda loop: too_many("int8", 86, loop)),
        ("codes by cast", moves_codes),
        ("another order of codes", moves_codes),
    ],
)
def test_gates_catch_planted_regressions(
    loops: Loops, regression: str, offends: Callable[[Loop], bool]
) -> None:
    assert offends(loops[f"planted: {regression}", 86])
