"""Pairs the two factors of each linear, checks them against the model's shapes, and codes them.

Coded factors have 8 bits, for places whose weights are packed, too. Each rank has one scale, the
product of its row's in A and its column's in B, and with it the number between the two is as large
as what it adds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from appliance.errors import AdapterError
from appliance.model.adapters.adapter import LowRank
from appliance.model.adapters.targets import Expansion, PlacedFactors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.model.adapters.targets import AdapterTarget

RANKS_AT_ONCE = 16  # of an expansion in the library
_ZERO = 128  # the code of 0
_LARGEST = 127  # of a code, from _ZERO
_EXPERT = re.compile(r"\.experts?(\.|$)|_exps\b|\.router\b|\.mlp\.gate$")
_TABLE = re.compile(r"(embed_tokens|lm_head|token_embd|^output)$")


@dataclass(slots=True)
class Factors:
    """Factors of an adapter, collected by the Hugging Face name of their linear.

    Attributes:
        targets: the linears that may be changed.
        unserved: returns, by name, the model part of each linear that may not be changed.
    """

    path: Path
    targets: Mapping[str, AdapterTarget]
    unserved: Callable[[], Mapping[str, str]]
    _a: dict[str, Tensor] = field(default_factory=dict)
    _b: dict[str, Tensor] = field(default_factory=dict)

    def add(self, stored: str, module: str, *, is_first: bool, factor: Tensor) -> None:
        """Add one factor.

        Args:
            stored: the tensor's name in the file, for messages.
            module: the linear's Hugging Face name.
            is_first: True for A, (rank, in_features); False for B, (out_features, rank).

        Raises:
            AdapterError: the factor fits no linear of the model.
        """
        target = self.targets.get(module)
        if target is None:
            raise AdapterError(f"{self.path}: tensor {stored} {self._no_place(module)}")
        if not factor.is_floating_point():
            raise self.wrong(stored, f"has type {factor.dtype}; factors are floats")
        if factor.dim() != 2 or not factor.numel():
            raise self.wrong(stored, f"has shape {tuple(factor.shape)}; a factor is a matrix")
        expected = target.slot.shape[1] if is_first else target.slot.shape[0]
        found = factor.shape[1] if is_first else factor.shape[0]
        if found != expected:
            which = "inputs" if is_first else "outputs"
            raise self.wrong(
                stored,
                f"is for {found:,} {which}, but {module} of this model has {expected:,}; the"
                " adapter belongs to a model of another size",
            )
        # NaN and infinity minus themselves are not 0; `isfinite` takes four times as long.
        if bool((factor - factor).sum() != 0):
            raise self.wrong(stored, "holds NaN or infinity; export the adapter again")
        (self._a if is_first else self._b)[module] = factor

    def paired(self, scale_of: Callable[[str, int], float]) -> dict[str, LowRank]:
        """Return the pairs in the order of the model's linears.

        Args:
            scale_of: scale of a linear's change, by its name and rank.

        Raises:
            AdapterError: a factor has no partner, the two do not match, or there are none.
        """
        parts: dict[str, LowRank] = {}
        for module in self.targets:
            a, b = self._a.get(module), self._b.get(module)
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise AdapterError(
                    f"{self.path}: {module} has one factor, A or B, without the other; download"
                    " the adapter again"
                )
            if a.shape[0] != b.shape[1]:
                raise AdapterError(
                    f"{self.path}: the factors of {module} have ranks {a.shape[0]} and"
                    f" {b.shape[1]}; download the adapter again"
                )
            parts[module] = LowRank(a.contiguous(), b.contiguous(), scale_of(module, a.shape[0]))
        if not parts:
            raise AdapterError(
                f"{self.path} changes no linear of this model; it belongs to another one"
            )
        return parts

    def notes(self, base: str, model: str) -> tuple[str, ...]:
        """Return notes about an adapter that may not do what its owner expects.

        Args:
            base: the base model that the adapter names; empty if none.
            model: the served model.
        """
        notes = []
        if base and _plain(base) not in _plain(model) and _plain(model) not in _plain(base):
            notes.append(f"it was trained on {base!r}, and the model served here is {model!r}")
        if not any(bool(b.any()) for b in self._b.values()):
            notes.append("all of its B factors are zero, so it changes nothing")
        return tuple(notes)

    def wrong(self, stored: str, why: str) -> AdapterError:
        return AdapterError(f"{self.path}: tensor {stored} {why}")

    def _no_place(self, module: str) -> str:
        if _TABLE.search(module):
            return (
                "changes the embedding or the head, which is not supported: train without"
                " embed_tokens and lm_head, or merge the adapter into the model"
            )
        if _EXPERT.search(module):
            return (
                "changes experts, which is not supported: train the linears of attention, or merge"
                " the adapter into the model"
            )
        if part := self.unserved().get(module):
            return (
                f"changes {module}, which belongs to {part}, where adapters are not supported:"
                " train without it, or merge the adapter into the model"
            )
        last = module.rpartition(".")[2]
        alike = sorted({name.rpartition(".")[2] for name in self.targets})
        if last in alike:
            return f"is of {module!r}, which this model does not have; it belongs to another one"
        return (
            f"is of {module!r}, which no adapter may change in this model; those that one may:"
            f" {', '.join(alike)}"
        )


def _plain(name: str) -> str:
    """Return the last part of a model's name without the suffixes of its formats."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\.(gguf|safetensors)$", "", last))


def coded(factors: PlacedFactors) -> PlacedFactors:
    """Return factors whose matrices are uint8, expansions of 16 ranks each.

    The ranks of each part are padded with zeros, and those that no output is expanded from are left
    out.
    """
    parts: dict[tuple[int, int], list[Expansion]] = {}
    for expansion in factors.expansions:
        ranks = expansion.first_rank, expansion.matrix.shape[1]
        parts.setdefault(ranks, []).append(expansion)
    shrink, scales, expansions, first = [], [], [], 0
    for (begin, count), own in parts.items():
        a, scale = (values[begin : begin + count] for values in (factors.shrink, factors.scales))
        of_rows = _largest(a, 1)
        of_columns = torch.stack([_largest(one.matrix, 0) for one in own]).amax(0)
        missing = -count % RANKS_AT_ONCE
        shrink.append(_padded(_codes(a, of_rows[:, None]), (0, 0, 0, missing)))
        scales.append(_padded(scale * of_rows * of_columns / _LARGEST**2, (0, missing), 0.0))
        for one in own:
            codes = _padded(_codes(one.matrix, of_columns), (0, missing))
            for at in range(0, count, RANKS_AT_ONCE):
                piece = codes[:, at : at + RANKS_AT_ONCE]
                expansions.append(Expansion(piece, one.first_output, first + at))
        first += count + missing
    return PlacedFactors(torch.cat(shrink), torch.cat(scales), tuple(expansions))


def _largest(values: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along a dimension, none of them 0."""
    low, high = torch.aminmax(values, dim=dim)
    return torch.maximum(high, -low).float().clamp(min=1e-30)


def _codes(values: Tensor, largest: Tensor) -> Tensor:
    return (values * (_LARGEST / largest)).add_(_ZERO).round_().to(torch.uint8)


def _padded(values: Tensor, missing: tuple[int, ...], zero: float = _ZERO) -> Tensor:
    return torch.nn.functional.pad(values, missing, value=zero) if any(missing) else values
