"""Computes what it would gain to widen quantized pages once a step, before prefill attends.

Nothing here is timed: rates are those of `kernels/gpu/rates.py`, instructions those of the compiled
kernels' table. A prompt's rows are a chunk that ends a context.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch

from appliance.kernels.attention.variant import Phase, Variant, choose_tile
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.rates import (
    ISSUED,
    LAUNCH_CLOCKS,
    PROGRAM_CLOCKS,
    rates_of,
    side_by_side,
    waves,
)
from appliance.kernels.kv_page.layout import PAGE_TOKENS, page_bytes
from bench.lib.conditions import ROOT

TABLE = ROOT / "tests" / "kernels" / "resources_triton_3.7.1.json"
# Compute capabilities, with the multiprocessors of RTX 3090, 4090, 5090 and H200.
CARDS = {86: ("RTX 3090", 82), 89: ("RTX 4090", 128), 120: ("RTX 5090", 170), 90: ("H200", 132)}
FORMATS = (KVFormat.INT8, KVFormat.INT4, KVFormat.INT4_SEALED)
CONTEXTS = (4096, 8192, 16384, 65536)
ROWS = (512, 2048, 8192)
# Llama-3.1-8B.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
WEIGHTS_OF_LAYER = 218_103_808


@dataclass(frozen=True, slots=True)
class Gain:
    """A step's share of time that widening once saves; below 0 it costs.

    Attributes:
        widenings: programs that widen the first page of a KV head today.
        before: clocks of a layer's attention on a multiprocessor.
        after: the same from widened pages, with what widens them.
        others: of its linears, at the full rate of the tensor cores.
    """

    widenings: int
    before: float
    after: float
    others: float

    @property
    def share(self) -> float:
        return (self.before - self.after) / (self.before + self.others)


@cache
def loop_instructions(kv_format: KVFormat, capability: int) -> int:
    """Return the instructions of a warp for a tile of keys."""
    kernels = json.loads(TABLE.read_text())["kernels"]
    found = kernels[f"attention prefill llama_8b bf16 kv {kv_format.value}"]
    return sum(found[str(capability)]["loop"].values())


def clocks_of_keys(kv_format: KVFormat, capability: int) -> tuple[int, float]:
    """Return the rows of a program, and its clocks for a page of keys on a multiprocessor."""
    variant = Variant(Phase.PREFILL, kv_format, torch.bfloat16, HEADS // KV_HEADS, HEAD_DIM)
    tile = choose_tile(variant, capability)
    pages = tile.block_n / PAGE_TOKENS
    issue = loop_instructions(kv_format, capability) * tile.num_warps / ISSUED / pages
    products = 2 * tile.block_m * PAGE_TOKENS * HEAD_DIM / rates_of(capability).products
    return tile.block_m, side_by_side(issue, products)


def attention_clocks(
    kv_format: KVFormat, capability: int, rows: int, context: int
) -> tuple[int, float]:
    """Return the programs of a KV head, and a layer's clocks on the busiest multiprocessor."""
    block_m, of_page = clocks_of_keys(kv_format, capability)
    programs = -(-rows * HEADS // KV_HEADS // block_m)
    keys = context - rows / 2  # on average
    program = keys / PAGE_TOKENS * of_page + PROGRAM_CLOCKS
    return programs, waves(programs * KV_HEADS, CARDS[capability][1]) * program


def widening_clocks(kv_format: KVFormat, capability: int, context: int) -> float:
    """Return a layer's clocks for widening a context, bound by memory: codes in, 16 bits out."""
    codes = page_bytes(kv_format.value, HEAD_DIM) / PAGE_TOKENS
    nbytes = context * KV_HEADS * (codes + 2 * 2 * HEAD_DIM)
    return nbytes / (CARDS[capability][1] * rates_of(capability).memory_bytes) + LAUNCH_CLOCKS


def gain(kv_format: KVFormat, capability: int, rows: int, context: int) -> Gain:
    """Compute what a prompt's chunk of `rows` gains at the end of a context."""
    programs, before = attention_clocks(kv_format, capability, rows, context)
    _, after = attention_clocks(KVFormat.BF16, capability, rows, context)
    after += widening_clocks(kv_format, capability, context)
    rate = CARDS[capability][1] * rates_of(capability).products
    return Gain(programs, before, after, rows * WEIGHTS_OF_LAYER / rate)


def cases() -> list[tuple[int, int]]:
    """List rows and contexts; a chunk is at most its context."""
    return [(rows, context) for rows in ROWS for context in CONTEXTS if rows <= context]


def widened_pages() -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table: shares of a step, of the least and the most format."""
    head = ["rows, context", *(f"{name} ({cc / 10})" for cc, (name, _) in CARDS.items())]
    lines = []
    for rows, context in cases():
        line = [f"{rows:,}, {context:,}"]
        for capability in CARDS:
            shares = [gain(form, capability, rows, context).share for form in FORMATS]
            line.append(f"{100 * min(shares):+.1f} to {100 * max(shares):+.1f} %")
        lines.append(line)
    return head, lines
