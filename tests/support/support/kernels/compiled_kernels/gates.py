"""Gates on compiled kernels: each finds the kernels that violate it.

They judge a table (table.py), whichever triton made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from ptx_machine.driver import SHARED_LIMIT
from support.kernels.compiled_kernels.decode_gates import LIMITS, Loop, moves_codes, too_many
from support.kernels.compiled_kernels.signatures.paged_attention import IN_PARTS, LLAMA
from support.kernels.compiled_kernels.table import Key, Table, every_signature

from appliance.kernels.gpu.residency import LARGEST, Footprint

REGISTER_LIMIT = 255
MOST_RESCALING = 68  # products for the 64 sums of a lane, and a row's maximum and sum
WIDENING = "packed|grouped"  # matmuls that widen weights in registers
INT8 = "int8"  # the matmul that widens them to int8

Gate = Callable[[Table], Collection[object]]  # finds the violations


def shipped(table: Table) -> Table:
    return {key: found for key, found in table.items() if not key[0].startswith("planted")}


def attention(table: Table) -> Table:
    """Attention kernels that multiply, over keys and values and over latents."""
    ours = re.compile(r"attention|latent_attention (decode|prefill)")
    return {key: found for key, found in table.items() if ours.match(key[0])}


def spilling(table: Table) -> Collection[object]:
    return [key for key, found in table.items() if found["stack"] or found["spills"]]


def too_large(table: Table) -> Collection[object]:
    return [
        key
        for key, found in table.items()
        if found["shared"] > SHARED_LIMIT[key[1]] * 1024 or found["registers"] > REGISTER_LIMIT
    ]


def multiplies_e4m3(key: Key) -> bool:
    """Whether a prefill over FP8 pages multiplies them on tensor cores without conversion."""
    whole = re.match(rf"attention prefill (?!{IN_PARTS.name}).* [bf]*16 kv fp8$", key[0])
    return bool(whole) and key[1] >= 89


def without_tensor_cores(table: Table) -> Collection[object]:
    return [
        key
        for key, found in attention(table).items()
        if not found["matrix_kinds"]
        or not set(found["matrix_kinds"])
        <= ({"QMMA", "QGMMA"} if multiplies_e4m3(key) else {"HMMA", "HGMMA"})
    ]


def masking_full_tiles(table: Table) -> Collection[object]:
    """Prefill that masks full tiles in its hot loop, or scales scores apart from the exponent.

    With a window few tiles are full, so one loop masks all of them. Where codes have a scale per
    token, it multiplies the scores. All other kernels multiply only the sums so far, or nothing
    where that is part of the sum.
    """
    unmasked = re.compile(r"attention prefill (?!gemma|gpt_oss).* [bf]*16 kv")
    offending = []
    for key, found in table.items():
        if unmasked.match(key[0]):
            loop = found["loop"]
            by_head = key[0].endswith(("kv bf16", "kv fp16", "kv fp8"))
            if "FSEL" in loop or (by_head and loop.get("FMUL", 0) > MOST_RESCALING):
                offending.append(key)
    return offending


def without_wide_loads(table: Table) -> Collection[object]:
    """Kernels without two 16-byte loads, which keep memory busy; `others` need none."""
    # Exempt: int4, whose pages are smaller than what threads could load; kernels whose threads
    # expand few rows of adapters, activate without a gate or gate heads, or rotate inputs, with one
    # such load in all; two words of a lane, of 2 and 3 bits of a trellis; kernels that gather the
    # rows of tiles, or choose experts by hundreds of numbers.
    others = re.compile(
        r"spans|kv_seal|token mask|attention prefill .* kv int4|grouped_matmul \w+ (count|sort)$"
        r"|adapters \w+ expand .* rows 8$|packed_matmul rows|packed_matmul dequantize trellis[23]"
        r"|expert_routing \w+ rows|activation \w+ bf16$|gates of heads|rotation"
    )
    return [
        key for key, found in table.items() if found["wide_loads"] < 2 and not others.match(key[0])
    ]


def sharing_rows(table: Table) -> Collection[object]:
    """Prefill whose warps share rows: they shuffle and synchronize in each tile.

    This judges tiles with as many rows as a head has dimensions, by their shuffles, barriers and
    stores to shared memory. In a warpgroup each warp has rows of its own, and codes go through
    shared memory.
    """
    own_rows = re.compile(r"(?:attention|planted) prefill:? (?!gemma).* (?:bf16|fp16) kv")
    sharing = []
    for key, found in table.items():
        if key[1] != 90 and own_rows.match(key[0]):
            loop = found["loop"]
            if {"STS", "STSM"} & loop.keys() or loop["SHFL"] > 12 or loop["BAR"] > 2:
                sharing.append(key)
    return sharing


def matmuls(table: Table, kind: str) -> Table:
    """Kernels that multiply, not those that prepare operands."""
    return {
        key: found
        for key, found in table.items()
        if re.search(rf"({kind})_matmul.* \w+ \d+$", key[0])
    }


def multiplying_otherwise(table: Table) -> Collection[object]:
    """Matmuls without the best tensor core instructions of their architecture."""
    wrong = [
        key
        for key, found in matmuls(table, "fp8").items()
        if found["matrix_kinds"] != ["QGMMA" if key[1] == 90 else "QMMA"]
    ]
    wrong += [
        key for key, found in matmuls(table, INT8).items() if found["matrix_kinds"] != ["IMMA"]
    ]
    for key, found in matmuls(table, WIDENING).items():
        # With few rows only two warps remain, too few for a warpgroup's instructions.
        warpgroup = key[1] == 90 and not key[0].endswith(("rows 8", "rows 16"))
        if found["matrix_kinds"] != ["HGMMA" if warpgroup else "HMMA"]:
            wrong.append(key)
    return wrong


# Opcodes that convert numbers, move weights between lanes or take them through memory.
DETOURS = {"I2F", "I2FP", "F2F", "SHFL", "STS", "STSM", "STL", "LDL", "MUFU"}


def taking_detours(table: Table) -> Collection[object]:
    """Matmuls of packed weights that do more in their loop than load, widen and multiply."""
    return [
        key
        for key, found in matmuls(table, f"{WIDENING}|{INT8}").items()
        if DETOURS & found["loop"].keys()
    ]


# Instructions per weight and lane in the hot loop, by codes, group or kind of record, rows of x.
MOST_INSTRUCTIONS = {
    ("int4", "g128", 8): 2.6,
    ("int4", "g128", 16): 3.0,
    ("int4", "g128", 32): 3.5,
    ("int4", "g32", 8): 3.7,
    ("int4", "g32", 16): 4.6,
    ("int8", "g32", 8): 3.4,
    ("int8", "g32", 16): 3.9,
    ("int4", "q4_k", 8): 4.6,
    ("int4", "q4_k", 16): 5.3,
    ("int5", "q4_k", 8): 5.8,
    ("int5", "q4_k", 16): 6.5,
    ("int6", "q6_k", 8): 5.1,
    ("int6", "q6_k", 16): 5.75,
    ("iq3_s_4", "odd_32", 8): 5.8,
    ("iq2_3", "odd_32", 8): 6.3,
    ("iq2_3", "odd_16", 8): 7.3,
    ("fp8", "per channel", 8): 3.1,
    ("fp8", "per channel", 16): 3.3,
    ("fp4", "g32", 8): 3.5,
    ("fp4", "g32", 16): 3.75,
    ("fp4", "g16", 8): 3.75,
    ("fp4", "g16", 16): 3.95,
    ("trellis2", "per channel", 8): 11.1,
    ("trellis2", "per channel", 16): 11.3,
    ("trellis2", "per channel", 32): 11.9,
    ("trellis3", "per channel", 8): 7.2,
    ("trellis3", "per channel", 16): 7.5,
    ("trellis3", "per channel", 32): 8.1,
    ("trellis4", "per channel", 8): 8.7,
    ("trellis4", "per channel", 16): 9.1,
    ("trellis4", "per channel", 32): 9.3,
    ("trellis5", "per channel", 8): 10.0,
    ("trellis5", "per channel", 16): 10.4,
    ("trellis5", "per channel", 32): 10.8,
}


def widening_slowly(table: Table) -> Collection[object]:
    """Matmuls of packed weights with more instructions per weight than the limit."""
    slow = []
    for key, found in matmuls(table, WIDENING).items():
        match = re.search(r"(\w+\d) (g\d+|per channel) (\w+) .*rows (\d+)$", key[0])
        if match is None:  # dense
            continue
        codes, group, params, rows = match[1], match[2], match[3], int(match[4])
        by_group = MOST_INSTRUCTIONS.get((codes, group, rows))
        limit = MOST_INSTRUCTIONS.get((codes, params, rows), by_group)
        each = sum(found["loop"].values()) / found["loop_elements"]
        if limit is not None and each > limit:
            slow.append(key)
    return slow


# Instructions of int8 matmuls per weight and lane, of a tile of 64 rows.
MOST_OF_INT8 = {
    ("g128", "fp32"): 5.2,
    ("g128", "fp16_zero"): 6.2,
    ("g128", "fp16_offset"): 5.9,
    ("g64", "fp32"): 7.2,
    ("g64", "fp16_zero"): 9.4,
    ("g64", "fp32_offset"): 9.2,
    ("g32", "fp32"): 11.8,
    ("g32", "fp16_zero"): 15.7,
    ("g32", "fp16_offset"): 15.7,
    ("g32", "q4_k"): 16.3,
}


def multiplying_int8_slowly(table: Table) -> Collection[object]:
    """Int8 matmuls with more instructions per weight than the limit, which all of them have."""
    slow = []
    for key, found in matmuls(table, INT8).items():
        match = re.search(r"int4 (g\d+) (\w+)", key[0])
        assert match, key
        each = sum(found["loop"].values()) / found["loop_elements"]
        if each > MOST_OF_INT8[match[1], match[2]]:
            slow.append(key)
    return slow


# Instructions that widen codes and apply zero points and scales.
WIDENING_OPCODES = ("LOP3", "SHF", "PRMT", "HADD2", "HFMA2", "HMUL2", "F2FP")
LEAST_BESIDE = 0.75  # the share of them that mma.sync leaves to run beside the products
MANY_ROWS = re.compile(
    r"packed_matmul.* (int4 g(64|128)|fp4) .*rows (64|128)$"
    r"|packed_matmul.* (int4 g32 .*rows 32|int\d g(16|32) .*rows 512)$"
)


def pausing_products(table: Table) -> Collection[object]:
    """Matmuls of many rows whose tensor cores wait while codes are widened.

    With mma.sync a warp widens most codes between its products. A warpgroup waits for wgmma, so
    there a multiprocessor must hold a second program, which multiplies meanwhile.
    """
    pausing = []
    for key, found in table.items():
        if not MANY_ROWS.search(key[0]):
            continue
        if found["matrix_kinds"] == ["HGMMA"]:
            warps = every_signature()[key].num_warps
            program = Footprint(found["registers"], found["shared"], warps)
            pauses = LARGEST[key[1]].resident(program) < 2
        else:
            all_of, beside = (
                sum(found[what].get(code, 0) for code in WIDENING_OPCODES)
                for what in ("loop", "beside")
            )
            pauses = beside < LEAST_BESIDE * all_of
        if pauses:
            pausing.append(key)
    return pausing


def multiplying_for_zero_points(table: Table) -> Collection[object]:
    """Return the matmuls whose zero points or offsets cost further products."""
    return [
        key
        for key, found in matmuls(table, WIDENING).items()
        if (plain := table.get((re.sub(r"fp16_zero|fp(16|32)_offset", "fp32", key[0]), key[1])))
        and found["matrix_products"] > plain["matrix_products"]
    ]


def decode_loop(table: Table, kv_format: str, capability: int) -> Loop:
    """The hot loop of decode over a KV format."""
    loop: Loop = table[f"attention decode {LLAMA.name} bf16 kv {kv_format}", capability]["loop"]
    return loop


def costly_elements(table: Table) -> Collection[object]:
    """Decode kernels that use too many instructions per element, or move its code around."""
    wrong = []
    for kv_format in LIMITS:
        for capability in sorted({capability for _, capability in table}):
            loop = decode_loop(table, kv_format, capability)
            moves = kv_format != "bf16" and moves_codes(loop)
            if not loop.get("HMMA") or too_many(kv_format, capability, loop) or moves:
                wrong.append((kv_format, capability, loop))
    return wrong


# Instructions per element, lane and warp of decode whose warps divide a head's dimensions.
MOST_IN_PARTS = {"bf16": 4.3, "fp8": 4.6, "int8": 3.4, "int4": 3.6, "int4-sealed": 3.7}


def costly_parts(table: Table) -> Collection[object]:
    """Decode kernels of divided heads that use too many instructions per element."""
    rows = {
        (kv_format, capability): table.get(
            (f"attention decode {IN_PARTS.name} bf16 kv {kv_format}", capability)
        )
        for kv_format in MOST_IN_PARTS
        for capability in {capability for _, capability in table}
    }
    each = {
        key: sum(found["loop"].values()) / found["loop_elements"]
        for key, found in rows.items()
        if found is not None  # only one capability has all formats
    }
    return [key for key, count in each.items() if count > MOST_IN_PARTS[key[0]]]


# The same for latents, each element of which belongs to a key and to a value: decode with few
# heads, with many, and the rows of a prompt. Twice as many warps as over BF16 widen codes, each for
# half of the elements.
MOST_OF_LATENTS = {
    "decode deepseek_v2_lite bf16 kv bf16": 4.2,
    "decode deepseek_v2_lite bf16 kv int8": 9.9,
    "decode deepseek_v3 bf16 kv bf16": 9.4,
    "decode mistral4 bf16 kv int8": 15.6,
    "prefill deepseek_v2_lite bf16 kv bf16": 10.4,
    "prefill deepseek_v2_lite bf16 kv int8": 10.2,
    "prefill mistral4 bf16 kv int8": 15.6,
}


def costly_latents(table: Table) -> Collection[object]:
    """Return latent attention with too many instructions, or whose latents go through registers."""
    wrong = []
    for key, found in table.items():
        limit = MOST_OF_LATENTS.get(key[0].removeprefix("latent_attention "))
        if limit is not None:
            loop = found["loop"]
            each = sum(loop.values()) / found["loop_elements"]
            if each > limit or "LDG" in loop or not loop.get("LDGSTS"):
                wrong.append(key)
    return wrong


# Known faults of older compilers' code, which nobody has fixed: a few registers of a float32 tile
# are spilled, and widening codes takes more instructions; scales of groups of 16, and with many
# rows third and fifth bits, reach their weights through shared memory, and so do all symbols of a
# trellis.
_NVFP4 = "packed_matmul llama_8b gate_up fp4 g16 halves bf16 rows"
_Q4_K = tuple(
    (f"packed_matmul llama_8b {name} rows 512", 90)
    for name in ("gate_up int4 g32 q4_k bf16 gated", "down int4 g32 q4_k bf16")
)
_UPPER_BITS = tuple(
    f"packed_matmul llama_8b down {codes} bf16 rows 512"
    for codes in ("int5 g32 q4_k", "int3 g16 q3_k", "int5 g32 q5_0", "int5 g32 q5_1")
)
_NAMED_UPPER_BITS = tuple(
    f"packed_matmul llama_8b down iq2_3 {group} bf16 rows 512"
    for group in ("g32 odd_32", "g16 odd_16")
)
_TRELLIS = {
    (f"packed_matmul llama_8b down trellis{bits} per channel none bf16 rows {rows}", cc): rows
    for bits in (2, 3, 4, 5)
    for cc in (86, 90, 120)
    for rows in ((8, 16, 32, 64, 128) if cc == 90 else (8, 16, 32, 128))
}
KNOWN: dict[tuple[str, Gate], tuple[tuple[str, int], ...]] = {
    ("3.6.0", pausing_products): tuple(
        (name, cc) for name in (f"{_NVFP4} 128", *_UPPER_BITS) for cc in (86, 120)
    ),
    # The first only checks other kernels; the second spills as much where rows see no picture; the
    # others spill a register.
    ("3.6.0", spilling): (
        ("attention decode gemma3_270m fp32 kv fp32", 86),
        ("attention prefill gemma3_4b pictures in windows bf16 kv fp8", 120),
        *_Q4_K,
        *(key for key, rows in _TRELLIS.items() if (rows, key[1]) == (128, 90)),
    ),
    ("3.6.0", taking_detours): (
        *_TRELLIS,
        *((f"{_NVFP4} {rows}", cc) for rows in (8, 16, 32, 128) for cc in (86, 90, 120)),
        (f"{_NVFP4} 64", 90),
        *(("packed_matmul llama_8b down int5 g32 q4_k bf16 rows 32", cc) for cc in (86, 90, 120)),
        *((name, cc) for name in (*_UPPER_BITS, *_NAMED_UPPER_BITS) for cc in (86, 90, 120)),
        *_Q4_K,
    ),
    ("3.6.0", widening_slowly): (
        *(
            (f"grouped_matmul qwen3_30b_a3b gate_up int4 g128 {params} bf16 rows 32", 120)
            for params in ("fp16_zero", "fp16_offset")
        ),
        *((f"{_NVFP4} {rows}", cc) for rows in (8, 16) for cc in (86, 90, 120)),
        *(key for key, rows in _TRELLIS.items() if rows <= 32),
    ),
}


def offenders(gate: Gate, table: Table, triton: str) -> list[object]:
    """The violations of a gate, without those that it is known to find with that triton."""
    return [key for key in gate(shipped(table)) if key not in KNOWN.get((triton, gate), ())]


GATES: tuple[Gate, ...] = (
    spilling,
    too_large,
    without_tensor_cores,
    without_wide_loads,
    sharing_rows,
    masking_full_tiles,
    multiplying_otherwise,
    taking_detours,
    widening_slowly,
    multiplying_int8_slowly,
    pausing_products,
    multiplying_for_zero_points,
    costly_elements,
    costly_parts,
    costly_latents,
)
