"""The rules by which a router chooses experts for a token, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    """The function that turns a router's logits into the scores that choose experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # of each alone
    SOFTMAX_OF_CHOSEN = "softmax of chosen"  # the logits choose; weights are over the chosen alone


@dataclass(frozen=True, slots=True)
class Router:
    """The choice of `top_k` of `num_experts` experts for a token, and their weights.

    Experts are chosen by their scores, plus a bias if there is one; the weights are the scores
    themselves. Only the `top_groups` best groups of experts remain; a group's score is the sum of
    its `best_of_group` best.

    Attributes:
        bias: the checkpoint holds a bias of the logits.
        renormalize: the chosen weights are divided by their sum.
        selection_bias: the checkpoint holds a bias of each expert, for the choice only.
        scale: multiplies the weights, at the end.
        expert_scale: the checkpoint holds a further factor of each expert's weights.
        epsilon: added to the sum that weights are divided by.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    bias: bool = False
    renormalize: bool = True
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2  # 1 or 2
    scale: float = 1.0
    epsilon: float = 0.0
    expert_scale: bool = False
