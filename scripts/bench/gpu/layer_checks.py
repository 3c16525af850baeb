"""Check the kernels of experts, recurrent layers and adapters on a few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from appliance.kernels.activation import Activation
from appliance.kernels.adapters import reference as reference_adapters
from appliance.kernels.adapters.factors import OutputRun, StackedFactors, blocks_of
from appliance.kernels.adapters.launch import add_adapters, plan_adapters
from appliance.kernels.expert_routing import reference as reference_routing
from appliance.kernels.expert_routing.launch import route
from appliance.kernels.gated_activation.reference import gated_activation
from appliance.kernels.grouped_matmul.launch import prepare_experts
from appliance.kernels.grouped_matmul.sorted_pairs import sort_pairs
from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear
from appliance.kernels.operations import ChosenExperts
from appliance.kernels.packed_matmul import launch as packed_launch
from appliance.kernels.recurrence import reference as reference_recurrence
from appliance.kernels.recurrence.launch import gated_delta, selective_scan
from appliance.kernels.routing import Router, Scoring
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.rows.state_spans import StateSpans
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.weight import Weight, dense
from bench.gpu.kernel_checks import (
    BF16,
    PRODUCTS,
    ROUNDING,
    Check,
    beside_torch,
    random_numbers,
    random_weight,
)
from bench.gpu.rows import relative_error

FORMATS = {"mxfp4": (torch.float8_e8m0fnu, 32), "nvfp4": (torch.float8_e4m3fn, 16)}
ROUTER = Router(256, 8, Scoring.SIGMOID, selection_bias=True, num_groups=8, top_groups=4, scale=2.5)
EXPERTS, HIDDEN, MIDDLE = 4, 256, 128  # rows of an expert are whole tiles


def all_checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """Yield the name and check of each kernel."""
    for form in FORMATS:
        yield f"packed_matmul {form} rows 5", partial(_fp4, device, form)
    for form, rows in (("int4", 1), ("int4", 90), ("mxfp4", 7)):
        yield f"grouped_matmul {form} rows {rows}", partial(_experts, device, form, rows)
    for rows in (1, 64, 200):
        yield f"expert_routing rows {rows}", partial(_routing, device, rows)
    yield "gated_delta", partial(_delta, device)
    yield "selective_scan", partial(_scan, device)
    for rows in (3, 200):
        yield f"adapters rows {rows}", partial(_adapters, device, rows)


def _random_fp4(device: torch.device, rows: int, columns: int, form: str) -> Fp4Weight:
    kind, group = FORMATS[form]
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator)
    one = 127 if form == "mxfp4" else 0x38  # bits of 1.0
    bits = one + torch.randint(-3, 3, (rows, columns // group), generator=generator)
    scale = (0.5 + torch.rand(rows, generator=generator)) / columns**0.5 / 4
    parts = codes.byte(), bits.byte().view(kind), scale
    return Fp4Weight(*(part.to(device) for part in parts))


def _fp4(device: torch.device, form: str) -> tuple[float, float]:
    weight, x = _random_fp4(device, 192, 512, form), random_numbers(device, 5, 512)
    out = packed_launch.prepare_linear(weight, None, BF16)(x)
    return beside_torch(out, x, dense(weight, torch.float32))


def _experts(device: torch.device, form: str, rows: int) -> tuple[float, float]:
    """Check two experts a row: some experts get no rows, and one gets most."""

    def stacked(outputs: int, inputs: int) -> StackedLinear:
        weight: Weight = (
            random_weight(device, EXPERTS * outputs, inputs, 4, 32)
            if form == "int4"
            else _random_fp4(device, EXPERTS * outputs, inputs, form)
        )
        return StackedLinear(weight, None, outputs)

    layer = StackedExperts(
        EXPERTS, stacked(2 * MIDDLE, HIDDEN), stacked(HIDDEN, MIDDLE), Activation.SILU, gated=True
    )
    run = prepare_experts(layer, BF16)
    assert run is not None
    x = random_numbers(device, rows, HIDDEN)
    ids = torch.tensor([[0, 2], [3, 0], [0, 3]], device=device)[torch.arange(rows) % 3]
    shares = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)).to(device)
    inner, down = (
        dense(one.weight, torch.float64).view(EXPERTS, one.out_features, -1)
        for one in (layer.inner, layer.down)
    )
    gate_up = torch.einsum("th,tkoh->tko", x.double(), inner[ids])
    middle = gated_activation(gate_up.flatten(0, 1), Activation.SILU).view(*ids.shape, -1)
    said = torch.einsum("tkm,tkom->tko", middle.double(), down[ids])
    return relative_error(
        run(x, ChosenExperts(ids, shares)), (said * shares[..., None]).sum(1)
    ), PRODUCTS


def _routing(device: torch.device, rows: int) -> tuple[float, float]:
    """Check a choice among groups: its weights, or 1 if an expert or a block of pairs is wrong."""
    logits = random_numbers(device, rows, ROUTER.num_experts).float()
    bias = _uniform(device, ROUTER.num_experts)
    found = route(logits, ROUTER, range(ROUTER.num_experts), bias)
    expected = reference_routing.route(logits, ROUTER, range(ROUTER.num_experts), bias)
    assert found.pairs is not None
    pairs = sort_pairs(expected.ids, ROUTER.num_experts)
    taken = pairs.experts >= 0
    blocks = (one.pairs.view(len(taken), -1)[taken] for one in (found.pairs, pairs))
    parts = ((found.ids, expected.ids), (found.pairs.experts, pairs.experts), tuple(blocks))
    is_same = all(torch.equal(*both) for both in parts)
    return relative_error(found.weights, expected.weights) if is_same else 1.0, 1e-5


def _spans(device: torch.device) -> StateSpans:
    """Return spans of one new row, of one that continues, and of 84 that do: a chunk and 20."""
    batch = RaggedBatch.of(
        [1, 1, 84], [1, 9, 128], [[0], [1], [2, 3, 4, 5]], block_size=32, device=device,
        state_slots=[2, 0, 3],
    )  # fmt: skip
    return StateSpans.of(batch)


def _uniform(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)).to(device)


def _beside(
    run: Callable[..., Tensor], reference: Callable[..., Tensor], *parts: Tensor, state: Tensor,
    spans: StateSpans,
) -> tuple[float, float]:  # fmt: skip
    """Return the larger error of what was read and of the states left behind."""
    left = state.clone()
    expected = reference(*parts, left, spans)
    found = run(*parts, state, spans)
    return max(relative_error(found, expected), relative_error(state, left)), 1e-4


def _delta(device: torch.device) -> tuple[float, float]:
    key_heads, heads, dim, rows = 2, 4, 128, 86
    query, key = random_numbers(device, 2, rows, key_heads, dim).float().unbind()
    value = random_numbers(device, rows, heads, dim, seed=1).float()
    key = torch.nn.functional.normalize(key, dim=-1)
    share = _uniform(device, 2, rows, heads)
    state = random_numbers(device, 5, heads, dim, dim, seed=2).float()
    rates, bias = _uniform(device, 2, heads)
    parts = (query / dim, key, value, share[0], share[1], rates, bias)
    run, reference = gated_delta, reference_recurrence.gated_delta
    return _beside(run, reference, *parts, state=state, spans=_spans(device))


def _scan(device: torch.device) -> tuple[float, float]:
    heads, groups, dim, width, rows = 8, 2, 64, 128, 86
    value = random_numbers(device, rows, heads, dim).float()
    key, query = random_numbers(device, 2, rows, groups, width, seed=1).float().unbind()
    step, (rates, bias) = _uniform(device, rows, heads), _uniform(device, 2, heads)
    state = random_numbers(device, 5, heads, width, dim, seed=2).float()
    run, reference = selective_scan, reference_recurrence.selective_scan
    return _beside(
        run, reference, value, key, query, step, rates, bias, state=state, spans=_spans(device)
    )


def _adapters(device: torch.device, rows: int) -> tuple[float, float]:
    """Check three slots, two parts, and rows without an adapter, which must keep their bits."""
    runs = (OutputRun(0, 0, 192, 0), OutputRun(192, 192, 64, 1))
    factors = StackedFactors(
        random_numbers(device, 3, 2, 16, 1024) / 32,
        random_numbers(device, 3, 256, 16, seed=1),
        _uniform(device, 3, 2),
        torch.tensor([[16, 16], [16, 0], [0, 16]], dtype=torch.int32, device=device),
        runs,
        torch.tensor(blocks_of(runs), dtype=torch.int32, device=device),
    )
    x, out = random_numbers(device, rows, 1024), random_numbers(device, rows, 256, seed=2)
    slots = torch.tensor([0, -1, 1, 2, 0], dtype=torch.int32, device=device)
    slots = slots[torch.arange(rows, device=device) % 5]
    expected, found = out.float(), out.clone()
    work = reference_adapters.plan_adapters(slots, 3)
    reference_adapters.add_adapters(expected, x.float(), factors, work)
    add_adapters(found, x, factors, plan_adapters(slots, 3))
    is_base = slots < 0
    changed = float((found[is_base] != out[is_base]).double().mean())
    return relative_error(found, expected) + changed, 2 * ROUNDING
