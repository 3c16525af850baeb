from __future__ import annotations

from functools import partial

import pytest
import torch

from appliance.kernels.expert_routing import reference
from appliance.kernels.expert_routing.launch import choose, route, router_logits, rows_of_program
from appliance.kernels.operations import ChosenExperts, RouterWeights
from appliance.kernels.routing import Router, Scoring

SOFTMAX, SIGMOID, OF_CHOSEN = Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SOFTMAX_OF_CHOSEN
# Of Qwen3-30B-A3B; Mixtral; Llama 4; gpt-oss; Gemma 4; DeepSeek V2 and V3; LFM2; Qwen3-Next;
# Nemotron 3 Super. Numbers that are no power of two, and groups of such.
ROUTERS = {
    "qwen3": Router(128, 8),
    "mixtral": Router(8, 2),
    "llama4": Router(16, 1, SIGMOID, renormalize=False),
    "gpt-oss": Router(32, 4, OF_CHOSEN, bias=True),
    "gemma4": Router(24, 3, expert_scale=True),
    "deepseek-v2": Router(
        160, 6, renormalize=False, num_groups=8, top_groups=3, best_of_group=1, scale=16.0
    ),
    "deepseek-v3": Router(
        256, 8, SIGMOID, selection_bias=True, num_groups=8, top_groups=4, scale=2.5, epsilon=1e-20
    ),
    "six groups": Router(
        60, 5, SIGMOID, selection_bias=True, num_groups=6, top_groups=2, epsilon=1e-6
    ),
    "lfm2": Router(32, 4, SIGMOID, selection_bias=True, epsilon=1e-6),
    "qwen3-next": Router(512, 10),
    "nemotron3": Router(512, 22, SIGMOID, selection_bias=True, scale=5.0, epsilon=1e-20),
    "one of one": Router(1, 1),
    "all": Router(5, 5, SIGMOID, selection_bias=True),
}
SHAPES = [(name, rows) for name in ROUTERS for rows in (1, 3, 21, 150)]


def tensors(
    router: Router, num_rows: int, seed: int = 0, extra: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Logits in rows that are `extra` longer, selection bias and scale of each expert."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, router.num_experts + extra, generator=random) * 2
    bias = torch.randn(router.num_experts, generator=random) / 4
    scale = torch.rand(router.num_experts, generator=random) + 0.5
    return (
        logits[:, : router.num_experts],
        bias if router.selection_bias else None,
        scale if router.expert_scale else None,
    )


def check_sorted(choice: ChosenExperts, num_here: int) -> None:
    """Each pair stands in one block of its expert, those of an expert in order."""
    rows = choice.pairs
    assert rows is not None
    assert rows.ids is choice.ids
    found = []
    blocks = rows.pairs.view(-1, rows.tile.block_m).tolist()
    for block, expert in zip(blocks, rows.experts.tolist(), strict=True):
        if expert < 0:
            assert expert == -1
            continue
        pairs = [pair for pair in block if pair >= 0]
        assert pairs, "no block is empty"
        assert block == [*pairs, *[-1] * (len(block) - len(pairs))]
        found += [(expert, pair) for pair in pairs]
    experts = enumerate(choice.ids.flatten().tolist())
    assert found == sorted((expert, pair) for pair, expert in experts if 0 <= expert < num_here)


# Within what a program reads at once, and beyond; with rows for the kernel, and for the library.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17])
@pytest.mark.parametrize(("width", "bias"), [(100, True), (2880, False)])
def test_logits_are_those_of_float64(
    width: int, bias: bool, num_rows: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(width)
    x = torch.randn(num_rows, width + 16, generator=random).to(dtype)[:, :width]
    weight = torch.randn(9, width, generator=random)
    shift = torch.randn(9, generator=random) if bias else None
    found = router_logits(x, weight, shift)
    expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert router_logits(x[:0], weight, shift).shape == (0, 9)


@pytest.mark.parametrize(("name", "num_rows"), SHAPES)
def test_choice_is_that_of_the_definition(name: str, num_rows: int) -> None:
    router = ROUTERS[name]
    logits, bias, scale = tensors(router, num_rows, extra=1)
    held = range(router.num_experts)
    found = route(logits, router, held, bias, scale)
    doubles = [None if x is None else x.double() for x in (bias, scale)]
    exact = reference.route(logits.double(), router, held, *doubles)
    assert found.ids.dtype == torch.int64
    assert torch.equal(found.ids, exact.ids)
    torch.testing.assert_close(found.weights.double(), exact.weights, rtol=3e-6, atol=1e-7)
    check_sorted(found, router.num_experts)


def weights_of(router: Router, width: int, *, gate: bool) -> RouterWeights:
    """Weights of a router that reads `width` elements; `gate`: with a row for the shared MLP."""
    random = torch.Generator().manual_seed(1)
    outputs = router.num_experts + gate
    weight = torch.randn(outputs, width, generator=random) * width**-0.5 * 2
    bias = torch.randn(outputs, generator=random) / 4 if router.bias else None
    _, selection, scale = tensors(router, 1)
    return RouterWeights(weight, bias, selection, scale)


# One launch for few rows; two and three for more. Shared experts are those of every row.
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3", "six groups", "nemotron3"])
@pytest.mark.parametrize(
    ("num_rows", "shared", "gate"),
    [(1, 0, True), (1, 1, True), (7, 2, False), (21, 3, True), (150, 1, True)],
)
def test_rows_are_multiplied_and_their_experts_chosen(
    name: str, num_rows: int, shared: int, gate: bool
) -> None:
    router = ROUTERS[name]
    weights = weights_of(router, 100, gate=gate)
    x = torch.randn(num_rows, 116, generator=torch.Generator().manual_seed(3)).bfloat16()[:, :100]
    held = range(router.num_experts)
    run = partial(choose, x, weights, router, held, shared=shared, has_gate=gate)
    found, logit = run()
    exactly = reference.choose_with(reference.router_logits, reference.route)
    expected, same = exactly(x, weights, router, held, shared=shared, has_gate=gate)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    assert (logit is None) == (same is None) == (not gate or shared > 0)
    if logit is not None and same is not None:
        torch.testing.assert_close(logit, same, rtol=1e-5, atol=1e-5)
    check_sorted(found, router.num_experts + shared)
    # Counters are as before, so the next launch chooses too.
    again, _ = run()
    assert torch.equal(again.ids, found.ids)
    assert torch.equal(again.weights, found.weights)


def random_router(seed: int) -> Router:
    """Any combination of rules, with sizes of every kind."""
    random = torch.Generator().manual_seed(seed)

    def one_of(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    groups = one_of(1, 1, 2, 3, 4, 8)
    of_group = one_of(2, 3, 5, 8, 20, 32)
    top_groups = one_of(*range(1, groups + 1))
    return Router(
        num_experts=groups * of_group,
        top_k=one_of(*range(1, min(top_groups * of_group, 12) + 1)),
        scoring=(SOFTMAX, SIGMOID, OF_CHOSEN)[one_of(0, 1, 2)],
        renormalize=bool(one_of(0, 1)),
        selection_bias=bool(one_of(0, 1)),
        num_groups=groups,
        top_groups=top_groups,
        best_of_group=one_of(1, 2),
        scale=(1.0, 0.3, 2.5)[one_of(0, 1, 2)],
        epsilon=(0.0, 1e-20, 1e-6)[one_of(0, 1, 2)],
        expert_scale=bool(one_of(0, 1)),
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_rules_choose_as_the_definition_does(seed: int) -> None:
    router = random_router(seed)
    num_rows = (1, 2, 9, 33)[seed % 4]
    logits, bias, scale = tensors(router, num_rows, seed)
    exact = [None if x is None else x.double() for x in (bias, scale)]
    expected = reference.route(logits.double(), router, range(router.num_experts), *exact)
    # A part of the experts, such as a rank has.
    held = range(router.num_experts // 3, max(1, router.num_experts // 3 * 2))
    found = route(logits, router, held, bias, scale)
    assert torch.equal(found.ids + held.start, expected.ids)
    torch.testing.assert_close(found.weights.double(), expected.weights, rtol=3e-6, atol=1e-7)
    check_sorted(found, len(held))


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3", "six groups"])
def test_among_equals_the_lowest_number_comes_first(name: str) -> None:
    router = ROUTERS[name]
    random = torch.Generator().manual_seed(2)
    logits = torch.randint(-2, 3, (6, router.num_experts), generator=random).float()
    logits[0] = 0.0
    logits[1] = torch.tensor([0.0, -0.0]).repeat(router.num_experts // 2)
    bias = torch.zeros(router.num_experts) if router.selection_bias else None
    found = route(logits, router, range(router.num_experts), bias)
    scores = logits.sigmoid() if router.scoring is SIGMOID else logits
    if router.num_groups > 1:
        groups = scores.view(6, router.num_groups, -1)
        worth = groups.sort(descending=True).values[..., :2].sum(-1)
        best = worth.sort(descending=True, stable=True).indices[:, : router.top_groups]
        is_best = torch.zeros_like(worth).scatter(1, best, 1).bool()
        scores = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    order = scores.sort(descending=True, stable=True).indices
    assert torch.equal(found.ids, order[:, : router.top_k])


# Numpy, which interprets, warns of every NaN that arithmetic makes.
@pytest.mark.compiled
@pytest.mark.parametrize("name", ROUTERS)
def test_a_broken_row_gets_experts_and_harms_no_other(name: str) -> None:
    router = ROUTERS[name]
    logits, bias, scale = tensors(router, 6)
    held = range(router.num_experts)
    whole = route(logits, router, held, bias, scale)
    broken = logits.clone()
    broken[1] = torch.nan
    broken[2, -1] = torch.nan
    broken[3] = -torch.nan
    broken[4] = torch.tensor([torch.inf, -torch.inf]).repeat(router.num_experts)[held]
    found = route(broken, router, held, bias, scale)
    for row in (0, 5):
        assert torch.equal(found.ids[row], whole.ids[row])
        assert torch.equal(found.weights[row], whole.weights[row])
    ids = found.ids.sort().values
    assert bool(((ids >= 0) & (ids < router.num_experts)).all())
    assert bool((ids.diff() > 0).all()), "no expert is chosen twice"
    assert found.weights[1].isnan().all(), "an engine finds NaN, and nothing else, in such a row"
    check_sorted(found, router.num_experts)


def test_the_reference_chooses_where_no_program_holds_a_row() -> None:
    for router in (Router(1200, 4), Router(128, 65), Router(900, 2, num_groups=9, top_groups=2)):
        logits, _, _ = tensors(router, 3)
        found = route(logits, router, range(router.num_experts))
        expected = reference.route(logits, router, range(router.num_experts))
        assert found.pairs is None
        assert torch.equal(found.ids, expected.ids)
    assert route(torch.empty(0, 128), ROUTERS["qwen3"], range(128)).ids.shape == (0, 8)


def test_a_decode_is_one_program_and_a_prompt_many() -> None:
    qwen3, deepseek, nemotron = (ROUTERS[name] for name in ("qwen3", "deepseek-v3", "nemotron3"))
    assert [rows_of_program(count, qwen3) for count in (1, 2, 8, 9, 64)] == [1, 8, 8, 64, 64]
    assert [rows_of_program(count, deepseek) for count in (1, 8, 9, 32)] == [1, 8, 32, 32]
    assert [rows_of_program(count, nemotron) for count in (1, 8, 9, 16)] == [1, 8, 16, 16]
    many = (65, qwen3), (512, qwen3), (33, deepseek), (17, nemotron)
    assert [rows_of_program(*case) for case in many] == [16, 16, 8, 4]
