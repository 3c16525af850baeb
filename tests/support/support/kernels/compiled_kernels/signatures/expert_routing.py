"""Named routers, and the signatures that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.expert_routing.launch import constexprs, num_warps, rows_of_program
from appliance.kernels.grouped_matmul.variant import choose_tile
from appliance.kernels.routing import Router, Scoring

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
    if capability == MOST_COMPILED:
        yield route_signature("qwen3_30b_a3b", QWEN3, 1)
        yield route_signature("qwen3_30b_a3b", QWEN3, 64)
        yield route_signature("qwen3_30b_a3b", QWEN3, MANY_ROWS)
        yield route_signature("gpt_oss", GPT_OSS, 64)
        yield route_signature("deepseek_v3", DEEPSEEK_V3, MANY_ROWS)


def route_signature(model: str, router: Router, num_rows: int) -> KernelSignature:
    """How `route_kernel` is compiled for the rows of a step."""
    rows = rows_of_program(num_rows, router)
    tile = choose_tile(num_rows * router.top_k, router.num_experts)
    fixed = constexprs(router, range(router.num_experts), rows, tile.block_m)
    types = {"ids_ptr": "*i64", "weights_ptr": "*fp32", "logits_ptr": "*fp32"}
    sorts = {"pairs_ptr": "*i32", "experts_ptr": "*i32"}
    types |= sorts if rows >= num_rows else {"counts_ptr": "*i32"}
    if router.selection_bias:
        types["bias_ptr"] = "*fp32"
    optional = {"counts_ptr", "pairs_ptr", "experts_ptr", "bias_ptr", "scale_ptr"}
    return KernelSignature(
        name=f"expert_routing {model} rows {num_rows}",
        module="appliance.kernels.expert_routing.kernel",
        function="route_kernel",
        types=types | dict.fromkeys(("num_rows", "num_blocks", "stride"), "i32"),
        constexprs={**fixed, **dict.fromkeys(optional - types.keys())},
        multiples_of_16=frozenset({"stride"}),
        num_warps=num_warps(fixed),
        num_stages=3,
    )
