"""Conditions on a card's figures that a model must meet to be served.

    0.1                           mean KLD at most 0.1, or refuse
    kld<=0.1, same-top>=90        both, or refuse
    warn:kld<=0.05, kld<=0.2      warn above 0.05, refuse above 0.2

Imports nothing heavy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.quant.quality.card import Card, Comparison

_CONDITION = re.compile(
    r"(?:(?P<action>[a-z]+):)?\s*(?:(?P<figure>[a-z0-9.-]+)\s*(?P<sign><=|>=)\s*)?"
    r"(?P<limit>[0-9.]+(?:e-?[0-9]+)?)\s*%?"
)


class Action(Enum):
    """Consequence of a failed condition."""

    WARN = "warn"
    REFUSE = "refuse"


# By name: the sign of its condition, and how to read its value.
_FIGURES: dict[str, tuple[str, Callable[[Comparison], float]]] = {
    "kld": ("<=", lambda found: found.kld_mean.value),
    "kld-p99": ("<=", lambda found: found.kld_p99),
    "kld-max": ("<=", lambda found: found.kld_max),
    "ppl-ratio": ("<=", lambda found: found.perplexity_ratio.value),
    "same-top": (">=", lambda found: found.same_top_percent.value),
}


@dataclass(frozen=True, slots=True)
class Condition:
    figure: str
    limit: float
    action: Action

    def is_met(self, comparison: Comparison) -> bool:
        sign, value = _FIGURES[self.figure]
        return value(comparison) <= self.limit if sign == "<=" else value(comparison) >= self.limit

    def __str__(self) -> str:
        return f"{self.figure}{_FIGURES[self.figure][0]}{self.limit:g}"


@dataclass(frozen=True, slots=True)
class QualityVerdict:
    """An action and its reason in one line."""

    action: Action
    reason: str


def parse_min_quality(text: str) -> tuple[Condition, ...]:
    """Parse conditions as described above, separated by commas, or raise ConfigError."""
    return tuple(_condition(part.strip().lower(), text) for part in text.split(","))


def judge(
    conditions: tuple[Condition, ...],
    card: Card | None,
    model: str,
    *,
    is_quantized: bool,
    prompt_int8: bool = False,
) -> list[QualityVerdict]:
    """Return a verdict per condition that a model fails.

    An unquantized model lost nothing and needs no card.

    Args:
        conditions: for its weights, and for what rounded inputs add.
        card: of the model.
        model: its name.
        is_quantized: its weights have lost something.
        prompt_int8: it is served with prompts in int8.
    """
    if card is None or card.comparison is None:
        if card is None and not is_quantized:
            return []
        lacks = "has no quality card" if card is None else "has a card without a base"
        return [_unjudged(conditions, f"{model} {lacks}")]
    verdicts = _verdicts(conditions, card.comparison, model)
    if prompt_int8 and card.prompt_int8 is None:
        lacks = "has a card without prompts in int8, which --prompt-int8 asks for"
        verdicts.append(_unjudged(conditions, f"{model} {lacks}"))
    elif prompt_int8 and card.prompt_int8 is not None:
        verdicts += _verdicts(conditions, card.prompt_int8, f"{model} with prompts in int8")
    return verdicts


def _verdicts(
    conditions: tuple[Condition, ...], comparison: Comparison, model: str
) -> list[QualityVerdict]:
    verdicts = []
    for condition in conditions:
        if not condition.is_met(comparison):
            value = _FIGURES[condition.figure][1](comparison)
            reason = f"{model} has {condition.figure} {value:.4g}, asked for was {condition}"
            verdicts.append(QualityVerdict(condition.action, reason))
    return verdicts


def _unjudged(conditions: tuple[Condition, ...], lacks: str) -> QualityVerdict:
    actions = {condition.action for condition in conditions}
    action = Action.REFUSE if Action.REFUSE in actions else Action.WARN
    reason = f"{lacks}; make one with: appliance evaluate MODEL --against BASE"
    return QualityVerdict(action, reason)


def _condition(part: str, text: str) -> Condition:
    match = _CONDITION.fullmatch(part)
    if match is None:
        raise _wrong(text, f"{part!r} is no condition")
    figure = match["figure"] or "kld"
    if figure not in _FIGURES:
        raise _wrong(text, f"{figure!r} is no figure; known are {', '.join(_FIGURES)}")
    sign = _FIGURES[figure][0]
    if match["sign"] not in (None, sign):
        raise _wrong(text, f"{figure} goes with {sign}")
    action = match["action"] or Action.REFUSE.value
    if action not in {known.value for known in Action}:
        raise _wrong(text, f"{action!r} is neither warn nor refuse")
    try:
        limit = float(match["limit"])
    except ValueError:
        raise _wrong(text, f"{match['limit']!r} is no number") from None
    return Condition(figure, limit, Action(action))


def _wrong(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"min_quality {text!r}: {reason}; write it like kld<=0.1, or warn:kld<=0.05,same-top>=90"
    )
