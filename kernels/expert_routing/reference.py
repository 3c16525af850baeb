"""Chooses experts as the models' authors define it, in float32.

Softmax: Mixtral (arXiv 2401.04088) and Qwen (arXiv 2505.09388). Groups by their best expert:
DeepSeek-V2 (arXiv 2405.04434). Sigmoid, selection bias and groups by their two best: DeepSeek-V3
(arXiv 2412.19437). Softmax of the chosen: gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from appliance.kernels.operations import ChosenExperts
from appliance.kernels.routing import Scoring

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.operations import Choose, RouterWeights
    from appliance.kernels.routing import Router


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (num_tokens, hidden_size) by weight (num_outputs, hidden_size) in float32."""
    return linear(x.float(), weight, bias)


def route(
    logits: Tensor,
    router: Router,
    held: range,
    selection_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    shared: int = 0,
    timed: TimedChoices | None = None,
) -> ChosenExperts:
    """Choose experts; the choice is not sorted, so nothing that was timed counts.

    Ties are broken as `torch.topk` breaks them on the device.

    Args:
        logits: (num_tokens, num_experts) float32.
        router: the rules.
        held: numbers of the experts that are here; the first of them is 0 in the choice.
        selection_bias: (num_experts,) float32; None without one.
        expert_scale: (num_experts,) float32; None without one.
        gate: (num_tokens, 1) float32, the logit of the weight of shared experts; None: it is 1.
        shared: experts that every token takes too; their numbers follow those of `held`.
    """
    if router.scoring is Scoring.SOFTMAX:
        scores = torch.softmax(logits, dim=-1)
    elif router.scoring is Scoring.SIGMOID:
        scores = logits.sigmoid()
    else:
        scores = logits
    choice = scores if selection_bias is None else scores + selection_bias
    if router.num_groups > 1:
        choice = _in_best_groups(choice, router)
    ids = torch.topk(choice, router.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = torch.softmax(weights, dim=-1)
    if router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + router.epsilon)
    weights = weights * router.scale
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    ids = ids - held.start if held.start else ids
    if shared:
        always = torch.arange(len(held), len(held) + shared, device=ids.device)
        share = weights.new_ones(len(ids), 1) if gate is None else gate.sigmoid()
        ids = torch.cat((ids, always.expand(len(ids), -1)), dim=1)
        weights = torch.cat((weights, share.expand(-1, shared)), dim=1)
    return ChosenExperts(ids, weights)


def choose_with(
    router_logits: Callable[..., Tensor], route: Callable[..., ChosenExperts]
) -> Choose:
    """Build `choose` from a backend's two operations."""

    def choose(
        x: Tensor,
        weights: RouterWeights,
        router: Router,
        held: range,
        *,
        shared: int = 0,
        has_gate: bool = False,
        timed: TimedChoices | None = None,
    ) -> tuple[ChosenExperts, Tensor | None]:
        """Choose the experts of rows.

        Args:
            x: (num_tokens, hidden_size), what the router reads.
            weights: of the router.
            router: the rules.
            held: as in `route`; likewise `shared`.
            has_gate: the last row of the weight is the gate of the shared MLP.
            timed: of the experts, for the kernels that sort the choice.

        Returns:
            The choice, and (num_tokens, 1) float32, the logit of the gate of a shared MLP that is
            none of the experts, or None.
        """
        logits, gate = router_logits(x, weights.weight, weights.bias), None
        if has_gate:
            logits, gate = logits[:, :-1], logits[:, -1:]
        settings = (weights.selection_bias, weights.expert_scale, gate if shared else None)
        choice = route(logits, router, held, *settings, shared=shared, timed=timed)
        return choice, None if shared else gate

    return choose


def _in_best_groups(choice: Tensor, router: Router) -> Tensor:
    """Return the scores, -inf outside the best groups."""
    groups = choice.view(len(choice), router.num_groups, -1)
    worth = groups.topk(router.best_of_group, dim=-1).values.sum(dim=-1)
    best = torch.topk(worth, router.top_groups, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
