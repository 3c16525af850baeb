"""The hot loop of decode, counted: what it costs to read an element of a key or a value."""

from __future__ import annotations

from support.kernels.compiled_kernels.signatures.paged_attention import LLAMA

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


def per_element(kv_format: str, loop: Loop) -> float:
    """Instructions."""
    return sum(loop.values()) * 32 * WARPS.get(kv_format, 1) / ELEMENTS


def too_many(kv_format: str, capability: int, loop: Loop) -> bool:
    """Whether they are more than the limit."""
    by_bits = kv_format == "fp8" and capability < 89
    return per_element(kv_format, loop) > (FP8_BITS_LIMIT if by_bits else LIMITS[kv_format])


def moves_codes(loop: Loop) -> bool:
    """Whether codes are converted one by one, or cross lanes or go back to shared memory."""
    detours = sum(count for code, count in loop.items() if code.startswith(("I2F", "STS")))
    return bool(detours or loop.get("SHFL", 0) > SHUFFLES or loop.get("LDS", 0) > SHARED_LOADS)
