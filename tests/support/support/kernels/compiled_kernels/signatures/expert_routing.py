"""Named routers, and the signatures that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.expert_routing.launch import (
    CHOSEN_ROWS,
    LOGITS_BLOCK,
    LOGITS_WARPS,
    ROWS_AT_ONCE,
    constexprs,
    num_warps,
    rows_of_program,
)
from appliance.kernels.grouped_matmul.variant import choose_tile
from appliance.kernels.routing import Router, Scoring

MODULE = "appliance.kernels.expert_routing.kernel"
QWEN3 = Router(128, 8)
GPT_OSS = Router(32, 4, Scoring.SOFTMAX_OF_CHOSEN, bias=True)
DEEPSEEK_V3 = Router(
    256,
    8,
    Scoring.SIGMOID,
    selection_bias=True,
    num_groups=8,
    top_groups=4,
    scale=2.5,
    epsilon=1e-20,
)
NEMOTRON_3 = Router(512, 22, Scoring.SIGMOID, selection_bias=True, scale=5.0, epsilon=1e-20)
MANY_ROWS = 512


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    yield route_signature("deepseek_v3", DEEPSEEK_V3, 32)
    yield route_signature("nemotron_3", NEMOTRON_3, 16)
    yield choose_signature("deepseek_v3", DEEPSEEK_V3, 1)
    if capability == MOST_COMPILED:
        yield logits_signature("qwen3_30b_a3b", 1)
        yield logits_signature("qwen3_30b_a3b", ROWS_AT_ONCE)
        yield choose_signature("nemotron_3", NEMOTRON_3, CHOSEN_ROWS)
        yield route_signature("qwen3_30b_a3b", QWEN3, 1)
        yield route_signature("qwen3_30b_a3b", QWEN3, 64)
        yield route_signature("qwen3_30b_a3b", QWEN3, MANY_ROWS)
        yield route_signature("gpt_oss", GPT_OSS, 64)
        yield route_signature("deepseek_v3", DEEPSEEK_V3, MANY_ROWS)


def logits_signature(model: str, rows: int) -> KernelSignature:
    """How `logits_kernel` is compiled for some rows at once."""
    types = {"logits_ptr": "*fp32", "x_ptr": "*bf16", "weight_ptr": "*fp32"}
    return KernelSignature(
        name=f"expert_routing {model} logits bf16 rows {rows}",
        module=MODULE,
        function="logits_kernel",
        types=types | dict.fromkeys(("num_rows", "num_outputs", "width", "x_stride"), "i32"),
        constexprs={"bias_ptr": None, "ROWS": rows, "BLOCK": LOGITS_BLOCK},
        multiples_of_16=frozenset({"num_outputs", "width", "x_stride"}),
        num_warps=LOGITS_WARPS,
        num_stages=3,
    )


def route_signature(model: str, router: Router, num_rows: int) -> KernelSignature:
    """How `route_kernel` is compiled for the rows of a step."""
    rows = rows_of_program(num_rows, router)
    tile = choose_tile(num_rows * router.top_k, router.num_experts)
    block_m = tile.block_m if rows >= num_rows else 0
    fixed = constexprs(router, range(router.num_experts), rows, block_m)
    types = {"ids_ptr": "*i64", "weights_ptr": "*fp32", "logits_ptr": "*fp32"}
    sorts = {"pairs_ptr": "*i32", "experts_ptr": "*i32"}
    types |= sorts if rows >= num_rows else {"counts_ptr": "*i32"}
    if router.selection_bias:
        types["bias_ptr"] = "*fp32"
    optional = {"counts_ptr", "pairs_ptr", "experts_ptr", "bias_ptr", "scale_ptr", "gate_ptr"}
    return KernelSignature(
        name=f"expert_routing {model} rows {num_rows}",
        module=MODULE,
        function="route_kernel",
        types=types | dict.fromkeys(("num_rows", "num_blocks", "stride"), "i32"),
        constexprs={**fixed, **dict.fromkeys(optional - types.keys())},
        multiples_of_16=frozenset({"stride"}),
        num_warps=num_warps(fixed),
        num_stages=3,
    )


def choose_signature(model: str, router: Router, num_rows: int) -> KernelSignature:
    """How `choose_kernel` is compiled for few rows, beside a shared expert with a gate."""
    rows = rows_of_program(num_rows, router)
    tile = choose_tile(num_rows * (router.top_k + 1), router.num_experts + 1)
    fixed = constexprs(router, range(router.num_experts), rows, tile.block_m, 1)
    types = {"ids_ptr": "*i64", "weights_ptr": "*fp32", "pairs_ptr": "*i32", "experts_ptr": "*i32"}
    types |= {"logits_ptr": "*fp32", "gate_ptr": "*fp32", "x_ptr": "*bf16", "weight_ptr": "*fp32"}
    if router.selection_bias:
        types["bias_ptr"] = "*fp32"
    types["arrived_ptr"] = "*i32"
    types |= dict.fromkeys(("num_rows", "num_blocks", "stride", "width", "x_stride"), "i32")
    absent = {"counts_ptr", "bias_ptr", "scale_ptr", "logit_bias_ptr"} - types.keys()
    multiplied = {"MULTIPLIED": min(num_rows, ROWS_AT_ONCE), "BLOCK": LOGITS_BLOCK}
    return KernelSignature(
        name=f"expert_routing {model} choose rows {num_rows}",
        module=MODULE,
        function="choose_kernel",
        types=types,
        constexprs={**fixed, **multiplied, **dict.fromkeys(absent)},
        multiples_of_16=frozenset({"width", "x_stride"}),
        num_warps=LOGITS_WARPS,
        num_stages=3,
    )
