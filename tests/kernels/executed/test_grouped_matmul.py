from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.unread import Unread
from support.gguf.ggml_weights import random_ggml
from support.kernels.fp4_weights import random_fp4
from support.kernels.packed_weights import random_packed

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.gated_activation.reference import activated, gated_activation
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices
from appliance.kernels.grouped_matmul.launch import prepare_experts
from appliance.kernels.grouped_matmul.sorted_pairs import sort_pairs
from appliance.kernels.grouped_matmul.timed_experts import TimedExperts
from appliance.kernels.grouped_matmul.variant import TILES, choose_tile, most_blocks, tile_of
from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear, padded_rows
from appliance.kernels.operations import ChosenExperts, Shared
from appliance.kernels.packed_matmul.tiled import TiledWeight, interleaved_gate_up
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.packed import OffsetKind
from appliance.kernels.weights.weight import Weight, dense
from appliance.model.linear import LinearPart

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ADDITIVE, ZERO_POINT = OffsetKind.ADDITIVE, OffsetKind.ZERO_POINT
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
RELATIVE = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}


def choice(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Experts of each token, all different, the first ones of all most often."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=random)
    scores *= torch.linspace(2, 0.5, num_experts)
    return scores.topk(top_k, dim=1).indices


def rows_of(out_features: int, num_experts: int) -> int:
    """Rows of all experts with padding, as `stack_experts` has them."""
    each = len(padded_rows(out_features, is_last=False))
    return each * (num_experts - 1) + len(padded_rows(out_features, is_last=True))


def random_fp8(rows: int, columns: int, *, blockwise: bool) -> Fp8Weight:
    random = torch.Generator().manual_seed(rows)
    codes = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    shape = (-(-rows // 128), -(-columns // 128)) if blockwise else (rows,)
    return Fp8Weight(codes, torch.rand(shape, generator=random) + 0.5)


def random_stack(
    form: str, out_features: int, in_features: int, num_experts: int, *, bias: bool = False
) -> StackedLinear:
    rows = rows_of(out_features, num_experts)
    weight: Weight
    if form == "dense":
        weight = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))
    elif form.startswith("fp4"):
        weight = random_fp4(rows, in_features, E8M0 if form == "fp4 g32" else E4M3)
        # Products of two such weights stay within float16.
        weight = replace(weight, row_scale=weight.row_scale / 1024)
    elif form in GGML_TYPES:
        weight = random_ggml(form, rows, in_features)
    elif form.startswith("fp8"):
        weight = random_fp8(rows, in_features, blockwise=form == "fp8 blocks")
    else:
        bits, group, kind = form.split()
        weight = random_packed(
            rows,
            in_features,
            int(group[1:]),
            bits=int(bits[3:]),
            kind=ADDITIVE if kind == "additive" else ZERO_POINT,
            symmetric=kind == "symmetric",
        )
    random = torch.Generator().manual_seed(1)
    return StackedLinear(
        weight, torch.randn(rows, generator=random) if bias else None, out_features
    )


def experts_of(stacked: StackedLinear, num_experts: int) -> tuple[torch.Tensor, Any]:
    """Each expert's weight (num_experts, out_features, in_features) float64, and bias."""
    each = len(padded_rows(stacked.out_features, is_last=False))
    whole = dense(stacked.weight, torch.float64)[: each * num_experts]
    weights = whole.view(num_experts, each, -1)[:, : stacked.out_features]
    if stacked.bias is None:
        return weights, None
    bias = stacked.bias[: each * num_experts].view(num_experts, each)
    return weights, bias[:, : stacked.out_features]


def layer(
    form: str,
    *,
    hidden: int = 128,
    middle: int = 96,
    num_experts: int = 5,
    activation: Any = Activation.SILU,
    gated: bool = True,
    bias: bool = False,
) -> StackedExperts:
    return StackedExperts(
        num_experts,
        random_stack(form, middle * (2 if gated else 1), hidden, num_experts, bias=bias),
        random_stack(form, hidden, middle, num_experts, bias=bias),
        activation,
        gated,
    )


def activations(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=random).to(dtype)


def grouped_matmul(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Each pair's row by the weight of its expert: (num_pairs, out_features) float64."""
    experts = ids.flatten()
    rows = x.double().repeat_interleave(len(experts) // len(x), dim=0)
    out = torch.einsum("pk,pnk->pn", rows, weights.double()[experts])
    return out if bias is None else out + bias.double()[experts]


def expected_of(
    stacked: StackedExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """In float64, rounded where the kernels round."""
    dtype = hidden.dtype
    inner = grouped_matmul(hidden, ids, *experts_of(stacked.inner, stacked.num_experts)).to(dtype)
    if stacked.gated:
        middle = gated_activation(inner, stacked.activation)
    else:
        assert isinstance(stacked.activation, Activation)
        middle = activated(inner, stacked.activation)
    said = grouped_matmul(middle, ids, *experts_of(stacked.down, stacked.num_experts))
    return (said.view(*ids.shape, -1) * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(1, 1, 1), (1, 3, 8), (5, 2, 3), (40, 8, 128), (150, 2, 4), (300, 1, 5)],
)
def test_each_pair_stands_in_one_block_of_its_expert(
    num_tokens: int, top_k: int, num_experts: int
) -> None:
    ids = choice(num_tokens, top_k, num_experts)
    rows = sort_pairs(ids, num_experts)
    blocks = rows.pairs.view(-1, rows.tile.block_m)
    assert (
        len(blocks) == len(rows.experts) == most_blocks(ids.numel(), num_experts, blocks.shape[1])
    )
    found = []
    for block, expert in zip(blocks.tolist(), rows.experts.tolist(), strict=True):
        if expert < 0:
            continue
        pairs = [pair for pair in block if pair >= 0]
        assert pairs, "no block is empty"
        assert block == [*pairs, *[-1] * (len(block) - len(pairs))]
        found += [(expert, pair) for pair in pairs]
    experts = ids.flatten().tolist()
    assert found == sorted((expert, pair) for pair, expert in enumerate(experts))


def test_blocks_have_room_for_the_worst_choice() -> None:
    tile = choose_tile(16, 8)
    for counts in ([9, 1, 1, 1, 1, 1, 1, 1], [16], [1] * 8 + [8], [15, 1]):
        taken = sum(-(-count // tile.block_m) for count in counts[:8])
        assert taken <= most_blocks(sum(counts[:8]), 8, tile.block_m)
    assert [choose_tile(count * 10, 10) for count in (1, 8, 9, 16, 17, 33, 500)] == [
        TILES[0],
        TILES[0],
        TILES[1],
        TILES[1],
        TILES[2],
        TILES[3],
        TILES[3],
    ]


# Every two of form and rows meet; widths that are no whole block or tile.
@pytest.mark.parametrize("num_tokens", [1, 23])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("int4 g32 additive", BF16),
        ("int4 g32 symmetric", FP16),
        ("int4 g32 zero", BF16),
        ("int8 g32 additive", FP16),
        ("int8 g32 symmetric", BF16),
        ("fp4 g32", BF16),
        ("fp4 g16", FP16),
        ("fp8 rows", BF16),
        ("dense", BF16),
        ("dense", FP32),
    ],
)
def test_experts_of_every_form(form: str, dtype: torch.dtype, num_tokens: int) -> None:
    stacked = layer(form)
    prepared = prepare_experts(stacked, dtype)
    assert prepared is not None
    ids = choice(num_tokens, 2, 5)
    hidden, weights = activations(num_tokens, 128, dtype), torch.rand(ids.shape)
    if form == "dense":
        stacked = rounded(stacked, dtype)
    found, expected = (
        prepared(hidden, ChosenExperts(ids, weights)),
        expected_of(stacked, hidden, ids, weights),
    )
    assert found.dtype == dtype
    bound = RELATIVE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


# An entry of the table with each tile that may replace it once it is timed.
@pytest.mark.parametrize("entry", [tile.max_rows for tile in TILES[:3]])
@pytest.mark.parametrize("form", ["int4 g32 zero", "fp4 g32", "dense"])
def test_each_timed_tile_computes_the_same(form: str, entry: int) -> None:
    stacked = layer(form)
    prepared = prepare_experts(stacked, BF16)
    assert prepared is not None
    work = TimedExperts(prepared, 5, 2, 0)
    hidden, chosen = work.inputs(entry, BF16, torch.device("cpu"))
    expected = expected_of(
        rounded(stacked, BF16) if form == "dense" else stacked, hidden, chosen.ids, chosen.weights
    )
    bound = RELATIVE[BF16] * float(expected.abs().max())
    tiles = [one.tile for one in work.candidates(entry)]
    assert len(set(tiles)) == len(tiles) >= 2
    for tile in tiles:
        work.use(TimedChoices({entry: LaunchChoice(tile)}))
        assert tile_of(chosen.ids.numel(), 5, prepared.timed) is tile
        found = work.run(hidden, chosen)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


# Each form with two of three heights of a tile; test_ggml_matmul reads all forms by tiles of each.
@pytest.mark.parametrize(
    ("form", "num_tokens"),
    [
        (form, num_tokens)
        for i, form in enumerate(
            ["Q6_K", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "IQ4_XS", "IQ3_S", "IQ2_XS"]
        )
        for j, num_tokens in enumerate([2, 40, 90])
        if (i + j) % 3
    ],
)
def test_experts_in_the_blocks_of_a_file(form: str, num_tokens: int) -> None:
    stacked = layer(form, hidden=256, middle=256, num_experts=3)
    prepared = prepare_experts(stacked, BF16)
    assert prepared is not None
    assert isinstance(prepared.inner.weight, TiledWeight)
    ids = choice(num_tokens, 2, 3)
    hidden, weights = activations(num_tokens, 256, BF16), torch.rand(ids.shape)
    found, expected = (
        prepared(hidden, ChosenExperts(ids, weights)),
        expected_of(stacked, hidden, ids, weights),
    )
    bound = RELATIVE[BF16] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("form", ["int4 g32 zero", "int8 g32 symmetric"])
def test_each_expert_reads_its_inputs_in_an_order_of_its_own(form: str) -> None:
    stacked = layer(form)
    random = torch.Generator().manual_seed(0)

    def reordered(linear: StackedLinear) -> StackedLinear:
        width = linear.weight.shape[1]
        orders = [torch.randperm(width, generator=random).int() for _ in range(5)]
        return replace(linear, order=torch.stack(orders))

    inner, down = reordered(stacked.inner), reordered(stacked.down)
    prepared = prepare_experts(replace(stacked, inner=inner, down=down), BF16)
    assert prepared is not None
    ids = choice(9, 2, 5)
    hidden, weights = activations(9, 128, BF16), torch.rand(ids.shape)
    found = prepared(hidden, ChosenExperts(ids, weights))
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        expected = torch.zeros(128, dtype=torch.float64)
        for expert, share in zip(experts, shares, strict=True):
            x = hidden[token]
            for linear in (inner, down):
                assert linear.order is not None
                weight = experts_of(linear, 5)[0][expert]
                x = (weight @ x[linear.order[expert].long()].double()).to(BF16)
                if linear is inner:
                    x = gated_activation(x[None], stacked.activation)[0]
            expected += x.double() * share
        bound = 2 * RELATIVE[BF16] * float(expected.abs().max())
        torch.testing.assert_close(found[token].double(), expected, rtol=0, atol=bound)


def rounded(stacked: StackedExperts, dtype: torch.dtype) -> StackedExperts:
    inner, down = (
        replace(linear, weight=dense(linear.weight, dtype))
        for linear in (stacked.inner, stacked.down)
    )
    return replace(stacked, inner=inner, down=down)


@pytest.mark.parametrize(
    "form",
    ["int4 g128 zero", "int4 g128 additive", "int8 g128 additive", "fp8 blocks", "Q5_1", "IQ4_NL"],
)
@pytest.mark.parametrize("num_tokens", [3, 60, 120])
def test_many_rows_of_an_expert_and_long_groups(form: str, num_tokens: int) -> None:
    """With tiles of every height."""
    stacked = layer(form, hidden=256, middle=128, num_experts=3, bias=True)
    prepared = prepare_experts(stacked, BF16)
    assert prepared is not None
    ids = choice(num_tokens, 2, 3)
    hidden, weights = activations(num_tokens, 256, BF16), torch.rand(ids.shape)
    found, expected = (
        prepared(hidden, ChosenExperts(ids, weights)),
        expected_of(stacked, hidden, ids, weights),
    )
    bound = RELATIVE[BF16] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("activation", "gated", "bias"),
    [
        (ClampedSwiGLU(7.0, 1.702), True, True),
        (Activation.GELU_TANH, True, False),
        (Activation.RELU_SQUARED, False, False),
    ],
)
def test_what_experts_do_between_their_linears(activation: Any, gated: bool, bias: bool) -> None:
    # Each expert's rows are an odd number of tiles, of which the last is not full.
    stacked = layer("int4 g32 additive", middle=160, activation=activation, gated=gated, bias=bias)
    prepared = prepare_experts(stacked, FP16)
    assert prepared is not None
    ids = choice(60, 3, 5)
    hidden, weights = activations(60, 128, FP16), torch.rand(ids.shape)
    found, expected = (
        prepared(hidden, ChosenExperts(ids, weights)),
        expected_of(stacked, hidden, ids, weights),
    )
    bound = 2 * RELATIVE[FP16] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


# Of all experts or some, whose others are numbered on both sides of them; with what is shared.
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("is_part", "weighs_inputs", "gated"),
    [(False, False, True), (True, False, None), (True, True, True), (False, True, False)],
)
def test_what_is_shared_is_added_before_the_sum_is_rounded(
    is_part: bool, weighs_inputs: bool, gated: bool | None, dtype: torch.dtype
) -> None:
    stacked = rounded(layer("dense"), dtype)
    prepared = prepare_experts(
        replace(stacked, is_part=is_part, weighs_inputs=weighs_inputs), dtype
    )
    assert prepared is not None
    ids = choice(9, 2, 5) + (torch.tensor([[-4, 0]]) if is_part else 0)
    is_here = (ids >= 0) & (ids < 5)
    assert bool(is_here.all()) is not is_part
    random = torch.Generator().manual_seed(3)
    weights = torch.rand(ids.shape, generator=random)
    rows = torch.randn(9, 200, generator=random).to(dtype)[:, :128]  # not contiguous
    gate = torch.randn(9, 4, generator=random)[:, 3:] * 30
    hidden = activations(9, 128, dtype)
    shared = None if gated is None else Shared(rows, gate if gated else None)
    found = prepared(hidden, ChosenExperts(ids, weights), shared)
    expected = torch.zeros(9, 128, dtype=torch.float64)
    for place in range(2):
        numbers, share = ids[:, place : place + 1].clamp(0, 4), weights[:, place, None]
        read, ones = (hidden * share.to(dtype)).to(dtype), torch.ones(9, 1)
        said = expected_of(stacked, read if weighs_inputs else hidden, numbers, ones)
        expected += said * (1 if weighs_inputs else share.double()) * is_here[:, place, None]
    if shared is not None:
        expected += rows.double() * (gate.double().sigmoid() if gated else 1)
    assert found.dtype == dtype
    bound = RELATIVE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)
    # The sum is rounded once: beside it, a sum of what was rounded before is further off.
    if dtype == BF16 and shared is not None:
        alone = prepared(hidden, ChosenExperts(ids, weights))
        twice = alone + (rows * gate.sigmoid() if gated else rows).to(dtype)
        error, more = ((one.double() - expected).square().mean() for one in (found, twice))
        assert error < more


def test_a_row_is_the_same_to_the_bit_beside_any_others() -> None:
    prepared = prepare_experts(layer("int4 g32 zero"), BF16)
    assert prepared is not None
    ids, hidden = choice(8, 2, 5), activations(8, 128, BF16)
    weights = torch.rand(ids.shape)
    whole = prepared(hidden, ChosenExperts(ids, weights))
    for rows in ([3], [5, 0], [7, 6, 1, 2]):
        assert torch.equal(
            prepared(hidden[rows], ChosenExperts(ids[rows], weights[rows])), whole[rows]
        )


def test_the_host_reads_nothing_back() -> None:
    prepared = prepare_experts(layer("int4 g32 zero"), BF16)
    assert prepared is not None
    ids, hidden = choice(4, 2, 5), activations(4, 128, BF16)
    with Unread():  # type: ignore[no-untyped-call]
        prepared(hidden, ChosenExperts(ids, torch.rand(ids.shape)))
        with pytest.raises(AssertionError, match="local_scalar_dense"):
            int(ids.max())
        with pytest.raises(AssertionError, match="nonzero"):
            torch.where(ids == 1)
    assert prepared.nbytes > 0


def test_weights_without_a_form_for_one_launch_are_left_to_run_in_turn() -> None:
    stacked = layer("int4 g32 zero")
    down = replace(stacked.down, weight=random_packed(rows_of(128, 5), 96, 48))
    assert prepare_experts(replace(stacked, down=down), BF16) is None


# Forms whose rows are their own; with biases, activations with limits, and tiles of every size.
@pytest.mark.parametrize(
    "form", ["int4 g32 zero", "int4 g128 symmetric", "fp4 g32", "Q4_K", "dense"]
)
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize(
    "activation",
    [Activation.SILU, Activation.GELU_TANH, ClampedSwiGLU(2.0, 1.7), BoundedSwiGLU(1.0)],
)
def test_gate_and_up_in_runs_are_one_launch(activation: Any, num_tokens: int, form: str) -> None:
    middle = 256 if form == "Q4_K" else 128 if "g128" in form else 96
    hidden = 256 if form == "Q4_K" else 128
    plain = layer(form, hidden=hidden, middle=middle, activation=activation, bias=form == "dense")
    if form == "dense":
        plain = rounded(plain, BF16)
    each = len(padded_rows(2 * middle, is_last=False))
    index = torch.arange(plain.inner.weight.shape[0])
    for expert in range(plain.num_experts):
        first = expert * each
        index[first : first + 2 * middle] = first + interleaved_gate_up(2 * middle)
    moved = LinearPart(plain.inner.weight, plain.inner.bias).rows(index)
    in_runs = replace(
        plain, in_runs=True, inner=replace(plain.inner, weight=moved.weight, bias=moved.bias)
    )
    prepared = prepare_experts(in_runs, BF16)
    assert prepared is not None
    ids = choice(num_tokens, 2, 5)
    x, weights = activations(num_tokens, hidden, BF16), torch.rand(ids.shape)
    expected = expected_of(plain, x, ids, weights)
    found = prepared(x, ChosenExperts(ids, weights))
    bound = RELATIVE[BF16] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2 * bound)
