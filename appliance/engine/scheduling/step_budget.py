"""Sizes a step's prompt rows to limit how much they slow running answers.

A cost model of a step, learned from measured steps:

    seconds = fixed + a * answers + b * context of the answers + prompts? * c + d * prompt rows + e
        * (prompt rows * context before them)

Its coefficients are never negative. Older steps count less. Each kind of step (answers only,
prompts only, both) decays separately, so an hour without prompts does not unlearn their cost; steps
of other kinds decay it slightly, so newer ones of its own kind outweigh it. Imports no torch and
knows neither sequences nor blocks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from appliance.engine.nouns.plan import StepLoad
from appliance.engine.scheduling.policy import (
    DECODE_SLOWDOWN,
    MAX_STALLS,
    MIN_PROMPT_ROWS,
    STALL_STEPS,
)

_SIZE = 6  # coefficients
_FORGET = 1 - 1 / 48  # share of a step's weight left after the next one of its kind
_FADE = 1 - 1 / 128  # and after one of another kind
_CONTEXT = 1024.0  # tokens per unit of context, so that all features have similar size
_OUTLIER = 3.0  # a slower step counts as this many times its expected duration
_TRUSTED = 8  # steps of a kind before it clips outliers
_SWEEPS = 8  # of coordinate descent
_FIT_EVERY = 8  # steps
# How much better a coefficient must explain than the others: where several explain the same steps,
# the number of rows is likelier the cause than their presence.
_DOUBT = (0.0, 0.0, 0.01, 0.02, 0.0, 0.02)
_PROMPTS, _BOTH = (False, True), (True, True)  # kinds: answers in a step? prompts?
_YOUNG = 64  # steps in which every query fits it: later a fit takes longer than a plan


def _features(load: StepLoad) -> tuple[float, ...]:
    return (
        1.0,
        float(load.num_answers),
        load.context / _CONTEXT,
        float(load.prompt_rows > 0),
        float(load.prompt_rows),
        load.prompt_work / _CONTEXT,
    )


@dataclass(slots=True)
class _Moments:
    """Decaying sums of one kind of step for least squares."""

    products: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _SIZE for _ in range(_SIZE)]
    )
    targets: list[float] = field(default_factory=lambda: [0.0] * _SIZE)
    count: int = 0
    last: int = 0  # number of the last step of this kind

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        # Errors are relative to a step's duration, so that short ones count as much as long ones.
        scaled = [feature / seconds for feature in features]
        for one, row in zip(scaled, self.products, strict=True):
            row[:] = [_FORGET * old + one * other for old, other in zip(row, scaled, strict=True)]
        self.targets[:] = [
            _FORGET * old + one for old, one in zip(self.targets, scaled, strict=True)
        ]
        self.count += 1


class StepBudget:
    """Learns the model and applies it.

    Args:
        slowdown: limit of a step with prompts, relative to one without.
        min_rows: prompt rows that are always allowed.
    """

    def __init__(self, slowdown: float = DECODE_SLOWDOWN, min_rows: int = MIN_PROMPT_ROWS) -> None:
        assert slowdown > 1
        assert min_rows > 0
        self._slowdown = slowdown
        self._min_rows = min_rows
        self._coefficients = [0.0] * _SIZE
        self._kinds: dict[tuple[bool, bool], _Moments] = {}
        self._num_steps = 0
        self._num_new = 0  # steps since the last fit
        self._most_rows = min_rows  # maximum seen with answers

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step.

        Args:
            load: its work; ignores a step without any, or with drafts.
            seconds: its duration.
        """
        if seconds <= 0 or load.draft_rows or not (load.num_answers or load.prompt_rows):
            return
        kind = (load.num_answers > 0, load.prompt_rows > 0)
        moments = self._kinds.setdefault(kind, _Moments())
        if moments.count >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * max(self.seconds(load), 1e-6))
        moments.add(_features(load), seconds)
        self._num_steps += 1
        moments.last = self._num_steps
        if kind == _BOTH:
            self._most_rows = max(self._most_rows, load.prompt_rows)
        self._num_new += 1
        if self._num_new >= _FIT_EVERY:
            self._fit()

    def seconds(self, load: StepLoad) -> float:
        """Predict a step's duration; 0 before anything was learned."""
        return sum(map(float.__mul__, self._coefficients, _features(load)))

    def prompt_rows(self, num_answers: int, context: int, start: int) -> int:
        """Return the number of prompt rows for a step: at least `min_rows`, unlimited at first.

        Args:
            num_answers: sequences with one row in this step.
            context: sum of the tokens that these read.
            start: tokens before the rows of the prompt that is furthest.
        """
        if not self._kinds:
            return sys.maxsize
        if self._num_new and self._num_steps < _YOUNG:
            self._fit()
        base = self.seconds(StepLoad(num_answers, context))
        *_, fixed, linear, work = self._coefficients
        spare = (self._slowdown - 1) * base
        if fixed < spare / 2:
            spare -= fixed
        else:
            # A step with prompts is slow however few rows it has, so it should have some.
            spare += (self._slowdown - 1) * fixed
        # spare = linear * rows + work * (start * rows + rows^2 / 2), solved for rows
        half = work / _CONTEXT / 2
        linear += 2 * half * start
        if spare <= 0:
            rows = 0
        elif half * spare > 1e-9 * linear**2:
            rows = int((math.sqrt(linear**2 + 4 * half * spare) - linear) / (2 * half))
        else:
            rows = int(spare / linear) if linear > 0 else 2 * self._most_rows
        # Never far beyond the rows already seen, whose cost the model may not know yet.
        return max(self._min_rows, min(rows, 2 * self._most_rows))

    def _fit(self) -> None:
        """Fit least squares over the kinds, by coordinate descent from the last solution."""
        self._num_new = 0
        products = [[0.0] * _SIZE for _ in range(_SIZE)]
        targets = [0.0] * _SIZE
        both = self._kinds.get(_BOTH)
        for kind, moments in self._kinds.items():
            if kind == _PROMPTS and both is not None and both.count >= _TRUSTED:
                continue  # rows are cheaper in large numbers than with answers
            weight = _FADE ** (self._num_steps - moments.last)
            rows = (*moments.products, moments.targets)
            for total, row in zip((*products, targets), rows, strict=True):
                total[:] = [one + weight * other for one, other in zip(total, row, strict=True)]
        found = self._coefficients
        for _ in range(_SWEEPS):
            for index in (4, 1, 5, 2, 0, 3):
                row, own = products[index], products[index][index]
                if own > 0:
                    rest = targets[index] - sum(map(float.__mul__, row, found))
                    value = found[index] + rest / own
                    found[index] = max(0.0, value / (1 + _DOUBT[index]))


@dataclass(slots=True)
class Stalls:
    """Saves up steps that prompts may have for themselves."""

    saved: float = float(MAX_STALLS)
    last: int = 0  # the last counted step

    def count(self, step: int) -> bool:
        """Save up to the step with this number; return True if there is one to spend."""
        self.saved = min(MAX_STALLS, self.saved + (step - self.last) / STALL_STEPS)
        self.last = step
        return self.saved >= 1

    def spend(self) -> None:
        self.saved -= 1
