"""Counts the instructions of decode's hot loop for an element of a key or a value."""

from __future__ import annotations

from support.kernels.compiled_kernels.signatures.paged_attention import LLAMA

# Instructions per element, lane and warp: 5 % above the measured number. Before 8.9 the hardware
# cannot convert E4M3, which then takes twice as many.
LIMITS = {"bf16": 2.9, "fp8": 2.2, "int8": 2.8, "int4": 3.15, "int4-sealed": 3.25}
FP8_BITS_LIMIT = 4.0
ELEMENTS = 2 * 32 * LLAMA.head_dim  # elements of a page, keys and values
WARPS = {"bf16": 2}  # the others have one
# The softmax takes 4 shuffles for a maximum, and as many for each of one or two sums.
SHUFFLES = 12
SHARED_LOADS = 34  # 16 bytes of codes each, and the scales

Loop = dict[str, int]  # opcode, instructions


def per_element(kv_format: str, loop: Loop) -> float:
    """Instructions per element."""
    return sum(loop.values()) * 32 * WARPS.get(kv_format, 1) / ELEMENTS


def too_many(kv_format: str, capability: int, loop: Loop) -> bool:
    """Whether a loop exceeds the limit."""
    by_bits = kv_format == "fp8" and capability < 89
    return per_element(kv_format, loop) > (FP8_BITS_LIMIT if by_bits else LIMITS[kv_format])


def moves_codes(loop: Loop) -> bool:
    """Whether codes are converted one by one, cross lanes or go back to shared memory."""
    detours = sum(count for code, count in loop.items() if code.startswith(("I2F", "STS")))
    return bool(detours or loop.get("SHFL", 0) > SHUFFLES or loop.get("LDS", 0) > SHARED_LOADS)
