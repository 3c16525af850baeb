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
    from torch import Tensor

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
) -> ChosenExperts:
    """Choose experts; the choice is not sorted.

    Ties are broken as `torch.topk` breaks them on the device.

    Args:
        logits: (num_tokens, num_experts) float32.
        router: the rules.
        held: numbers of the experts that are here; the first of them is 0 in the choice.
        selection_bias: (num_experts,) float32; None without one.
        expert_scale: (num_experts,) float32; None without one.
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
    return ChosenExperts(ids - held.start if held.start else ids, weights)


def _in_best_groups(choice: Tensor, router: Router) -> Tensor:
    """Return the scores, -inf outside the best groups."""
    groups = choice.view(len(choice), router.num_groups, -1)
    worth = groups.topk(router.best_of_group, dim=-1).values.sum(dim=-1)
    best = torch.topk(worth, router.top_groups, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
