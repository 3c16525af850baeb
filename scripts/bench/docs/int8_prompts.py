"""Computes what prompts in int8 gain for the linears of a Llama-3.1-8B; nothing here is timed.

The model is that of `kernels/int8_matmul/tiles.py`, which decides where the kernel is used.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.kernels.gpu.residency import LARGEST
from appliance.kernels.int8_matmul.tiles import int8_clocks, usual_clocks
from appliance.kernels.packed_matmul.slices import LinearForm
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import ROW_STEP

# Compute capabilities, with the multiprocessors of cards.
CARDS = {86: ("RTX 3090", 82), 89: ("RTX 4090", 128), 120: ("RTX 5090", 170)}
LINEARS = {
    "qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)
}  # fmt: skip
FORMS = {
    "128, symmetric": (Params.FP32, 128),
    "128, zero points": (Params.FP16_ZERO, 128),
    "64, zero points": (Params.FP16_ZERO, 64),
    "32, symmetric (Q4_0)": (Params.FP32, 32),
    "32, offsets (Q4_1)": (Params.FP16_OFFSET, 32),
    "32, Q4_K": (Params.Q4_K, 32),
}
ROWS = (64, 512)
BLOCK_K = 128


def clocks(name: str, rows: int, params: Params, group_size: int, cc: int) -> tuple[float, float]:
    """Return a linear's clocks in 16 bits, and in int8."""
    out_features, in_features = LINEARS[name]
    nbytes = out_features * in_features * (4 + 32 / group_size) / 8
    form = LinearForm(
        out_features,
        in_features,
        in_features // BLOCK_K,
        BLOCK_K,
        int(nbytes),
        Codes.INT4,
        params,
        group_size,
        gated=name == "gate and up",
    )
    card = replace(LARGEST[cc], num_sms=CARDS[cc][1])
    return usual_clocks(form, rows // ROW_STEP, cc, card), int8_clocks(form, rows, cc, card)


def int8_prompts() -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table: how many times as fast, each linear and all together."""
    head = ["groups of", "rows", *(f"{name} ({cc / 10})" for cc, (name, _) in CARDS.items())]
    lines = []
    for form, kinds in FORMS.items():
        for rows in ROWS:
            line = [form, f"{rows:,}"]
            for cc in CARDS:
                times = [clocks(name, rows, *kinds, cc) for name in LINEARS]
                each = [usual / ours for usual, ours in times]
                usual, ours = map(sum, zip(*times, strict=True))
                line.append(f"{usual / ours:.1f} ({min(each):.1f} to {max(each):.1f})")
            lines.append(line)
    return head, lines
