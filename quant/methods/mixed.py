"""Chooses bits per linear to change a model's answers least at a given size.

One pass over the layers measures the effect of rounding each linear alone on the model's answers.
The effect grows with the error energy of the linear's outputs and adds up over linears. Scaled by
that energy, it predicts the loss at every other precision; a budget of bits is then spent step by
step where a bit saves most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ConfigError
from appliance.files import replace_atomically
from appliance.kernels.weights.trellis import BITS
from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.quant.methods import rtn, trellis
from appliance.quant.methods.gptq import output_energy
from appliance.quant.methods.sensitivity import Variants

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.text.calibration import Calibration

DENSE_BITS = 16.0
PROBE_TOKENS = 256  # tokens per row
PROBE_ROWS = 2
FINE_PROBE_BITS = 3.5  # mean bits from which rounding to 4, not 3, stands for a trellis
Scheme = WeightScheme | TrellisScheme
Schemes = dict[str, Scheme | None]  # of linear weights by name; None keeps 16 bits
Losses = dict[Scheme, float]  # energy of the outputs' errors
FILE = "precisions.json"


def kept_schemes(
    source: ModelSource,
    options: QuantizeOptions,
    calibration: Calibration,
    dtype: torch.dtype,
    state: Path,
) -> Schemes:
    """Return the schemes of an earlier run, or choose with `mixed_schemes` and keep them.

    `state` is the folder of this run's state.

    Raises:
        ConfigError: see `mixed_schemes`.
        OSError: the choice cannot be written.
    """
    path = state / FILE
    if path.exists():
        stored = msgspec.json.decode(path.read_bytes(), type=dict[str, WeightScheme | int | None])
        return {
            name: TrellisScheme(scheme) if isinstance(scheme, int) else scheme
            for name, scheme in stored.items()
        }
    chosen = mixed_schemes(source, options, calibration, dtype)
    kept = {
        name: scheme.bits if isinstance(scheme, TrellisScheme) else scheme
        for name, scheme in chosen.items()
    }
    with replace_atomically(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(kept))
    return chosen


def mixed_schemes(
    source: ModelSource, options: QuantizeOptions, calibration: Calibration, dtype: torch.dtype
) -> Schemes:
    """Choose schemes by sensitivity for `options.mixed` bits per weight.

    Raises:
        ConfigError: the scheme is FP8, or the budget is below the smallest precision.
    """
    assert options.mixed is not None
    if not isinstance(options.scheme, Scheme):
        raise ConfigError(
            "--mixed chooses among integers of 3, 4 and 8 bits, or a trellis of 2 to 5; use another"
            " --method"
        )
    return choose_precisions(source, calibration.rows, options.scheme, options.mixed, dtype)


def choose_precisions(
    source: ModelSource,
    rows: Tensor,
    scheme: Scheme,
    bits_per_weight: float,
    dtype: torch.dtype,
) -> Schemes:
    """Choose a scheme for each linear weight of a model's layers, by name.

    Args:
        rows: (num_rows, row_tokens) calibration tokens; only the start of the first rows is used.
        scheme: gives group size and symmetry; sensitivity is measured at its bits. Linears of a
            trellis are rounded for that, and each part of one gets bits of its own.
        bits_per_weight: mean over the layers' linears, scales and zero points included.
        dtype: of stored scales.

    Raises:
        ConfigError: the smallest precisions exceed the budget.
    """
    probes = rows[:PROBE_ROWS, :PROBE_TOKENS]
    variants = Variants(source, probes)
    energies: list[tuple[Losses, float]] = []
    shapes: list[tuple[int, ...]] = []
    names: list[tuple[str, ...]] = []
    for index in range(len(source.spec.layers)):
        block = variants.block(index)
        moments = variants.observe(block)
        stored = source.family.names.linears(index)
        for linear, seen, parts in zip(block.linears(), moments, stored, strict=True):
            for together, where in _parts(source, parts, scheme):
                part = linear.weight[where].clone()
                names.append(together)
                shapes.append(tuple(part.shape))
                probe, lost = _losses(part, seen.hessian, scheme, bits_per_weight, dtype)
                if lost:
                    linear.weight[where] = probe
                    variants.branch(block)
                    linear.weight[where] = part
                energies.append((lost, output_energy(part - probe, seen.hessian)))
        variants.advance(block)
    measured = iter(variants.divergences())
    choices = [
        list(_choices(shape, lost, probed, measured))
        for shape, (lost, probed) in zip(shapes, energies, strict=True)
    ]
    picked = spend(choices, bits_per_weight)
    return {
        name: choice.scheme for group, choice in zip(names, picked, strict=True) for name in group
    }


@dataclass(frozen=True, slots=True)
class Choice:
    """One precision of one linear.

    Attributes:
        scheme: None keeps 16 bits.
        size: bits of the linear's weights, scales and zero points included.
        loss: expected KL divergence in nats per token.
    """

    scheme: Scheme | None
    size: float
    loss: float


def spend(choices: Sequence[Sequence[Choice]], bits_per_weight: float) -> list[Choice]:
    """Choose the least loss within a budget, taking the steepest step first.

    Each linear's largest choice is 16 bits.

    Raises:
        ConfigError: the smallest choices exceed the budget.
    """
    weights = sum(max(c.size for c in options) / DENSE_BITS for options in choices)
    picked = [min(options, key=lambda c: c.size) for options in choices]
    left = bits_per_weight * weights - sum(choice.size for choice in picked)
    if left < 0:
        least = sum(choice.size for choice in picked) / weights
        raise ConfigError(
            f"--mixed {bits_per_weight:g} is less than the {least:.2f} bits that the smallest"
            " precision takes with its scales"
        )
    while True:
        steps = [
            ((picked[i].loss - choice.loss) / (choice.size - picked[i].size), i, choice)
            for i, options in enumerate(choices)
            for choice in options
            if 0 < choice.size - picked[i].size <= left and choice.loss < picked[i].loss
        ]
        if not steps:
            return picked
        _, at, choice = max(steps, key=lambda step: (step[0], -step[1]))
        left -= choice.size - picked[at].size
        picked[at] = choice


def _parts(
    source: ModelSource, names: tuple[str, ...], scheme: Scheme
) -> Iterator[tuple[tuple[str, ...], slice]]:
    """Yield the rows of a linear that get one scheme: all, or each weight of a trellis."""
    ends = list(accumulate(source.weights.shape(name)[0] for name in names))
    if not isinstance(scheme, TrellisScheme):
        yield names, slice(0, ends[-1])
        return
    for name, start, end in zip(names, (0, *ends), ends, strict=False):
        yield (name,), slice(start, end)


def _losses(
    weight: Tensor, hessian: Tensor, scheme: Scheme, bits_per_weight: float, dtype: torch.dtype
) -> tuple[Tensor, Losses]:
    """Return a rounded weight, and the energy of errors of each scheme that fits; none if none."""
    width = weight.shape[1]
    if isinstance(scheme, TrellisScheme):
        if scheme.fit(width)[0] is None:
            return weight, {}
        bits = 3 if bits_per_weight < FINE_PROBE_BITS else 4
        probe = rtn.quantize(weight, WeightScheme(bits, 64), dtype).dequantize()
        energy = trellis.error_energy(weight, hessian)
        return probe, {TrellisScheme(n): energy * trellis.MEAN_ERRORS[n] for n in BITS}
    fitted = _fitted(scheme, width)
    if fitted is None:
        return weight, {}
    lost: Losses = {}
    probe = weight
    for candidate in _candidates(scheme, width):
        rounded = rtn.quantize(weight, candidate, dtype).dequantize()
        lost[candidate] = output_energy(weight - rounded, hessian)
        if candidate == fitted:
            probe = rounded
    return probe, lost


def _fitted(scheme: WeightScheme, in_features: int) -> WeightScheme | None:
    return scheme.fit(in_features)[0]


def _candidates(scheme: WeightScheme, in_features: int) -> list[WeightScheme]:
    wanted = [replace(scheme, bits=bits) for bits in (3, 4, 8)]
    wanted += [replace(scheme, bits=bits, group_size=32) for bits in (3, 4)]
    fitted = [_fitted(candidate, in_features) for candidate in (scheme, *wanted)]
    return list(dict.fromkeys(candidate for candidate in fitted if candidate is not None))


def _choices(
    shape: tuple[int, ...], lost: Losses, probed: float, measured: Iterator[float]
) -> Iterator[Choice]:
    """Yield a linear's choices; `probed` is the energy of the error that was measured."""
    count = shape[0] * shape[1]
    yield Choice(None, DENSE_BITS * count, 0.0)
    if not lost:
        return
    divergence = next(measured)
    for candidate, energy in lost.items():
        share = energy / max(probed, 1e-30)
        yield Choice(candidate, _bits(candidate, shape[1]) * count, divergence * share)


def _bits(scheme: Scheme, in_features: int) -> float:
    if isinstance(scheme, TrellisScheme):
        return scheme.bits + 16 / in_features
    zero_point = 0 if scheme.symmetric else scheme.bits
    return scheme.bits + (16 + zero_point) / (scheme.group_size or in_features)
