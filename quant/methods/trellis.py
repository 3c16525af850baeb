"""Codes a weight's rotated inputs by a trellis, and corrects later ones for each one's error.

A column of a weight is coded in sequences of 64 outputs by Viterbi's algorithm; what it misses is
made up for by the columns that follow, as in GPTQ. See `appliance.kernels.weights.trellis`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from appliance.errors import QuantizeError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import LibraryError, load_library
from appliance.kernels.cpu.parts import encode_trellis
from appliance.kernels.weights.trellis import BLOCK, UNIT, TrellisWeight, rotated
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.methods.gptq import DAMPING, inverse_factor

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import LinearScheme

DOUBT = 0.2  # share of the measured correlations attributed to chance; see methods/gptq.py
COLUMNS_AT_ONCE = 64
# Mean squares of errors on normal numbers, by bits; docs/trellis.md has the bounds.
MEAN_ERRORS = {2: 0.077, 3: 0.0215, 4: 0.0054, 5: 0.0016}
# Exponent of how much outputs matter, of which few tokens tell: of what four layers of SmolLM2-135M
# lose at 3 bits without, 0.91 was left by 3,072 tokens, 0.88 by 10,240; with 1, 0.95 and 0.88.
TRUST = 0.5
LEAST_SHARE = 1e-3  # of the mean that an output's error counts
_OF_THREAD = threading.local()


def quantize_linear(
    weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
) -> TrellisWeight:
    """Quantize a weight; see `Quantizer`. Without moments every input counts alike.

    Raises:
        QuantizeError: moments hold NaN or infinity, or there is no CPU library.
    """
    assert isinstance(scheme, TrellisScheme), scheme
    if hessian is None:
        hessian = torch.eye(weight.shape[1], device=weight.device)
    return quantize(weight, hessian, scheme.bits, dtype)


def quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    damping: float = DAMPING,
    doubt: float = DOUBT,
    matters: Tensor | None = None,
) -> TrellisWeight:
    """Quantize one linear weight.

    Args:
        weight: (out_features, in_features), finite; 64 divides in_features.
        hessian: (in_features, in_features) float32, mean of x x^T over calibration tokens.
        bits: of a symbol, 2 to 5.
        dtype: that scales are rounded to.
        damping: share of the mean diagonal to add to the diagonal.
        doubt: share to reduce off-diagonal moments by.
        matters: (out_features,) float32, how much each output's squared error counts; None: alike.

    Raises:
        QuantizeError: as for `quantize_linear`.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError("activations hold NaN or infinity")
    outputs = weight.shape[0]
    factor, order, moments = _feedback(hessian, damping, doubt)
    original = rotated(weight.float().contiguous())
    unit = original.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30) / UNIT[bits]
    padding = 0, -outputs % BLOCK
    left = torch.nn.functional.pad((original / unit)[:, order].T, padding)
    counts = unit.squeeze(1).square()
    if matters is not None:
        counts = counts * matters.pow(TRUST)
    counts = _shares(torch.nn.functional.pad(counts, padding).view(-1, BLOCK)).cpu()
    symbols = torch.empty(left.shape, dtype=torch.uint8)
    values = torch.empty_like(left)
    for start in range(0, len(order), COLUMNS_AT_ONCE):
        end = min(start + COLUMNS_AT_ONCE, len(order))
        errors = torch.empty_like(left[start:end])
        for i in range(start, end):
            column = left[i].view(-1, BLOCK).cpu()
            code, value = encode_trellis(_engine(), bits, column, counts)
            symbols[i], values[i] = code.flatten(), value.flatten().to(left.device)
            error = (left[i] - values[i]) / factor[i, i]
            errors[i - start] = error
            left[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    found = values[back].T[:outputs]
    projected = found @ moments
    squares = (projected * found).sum(1)
    scale = torch.where(squares > 0, (projected * original).sum(1) / squares, unit.squeeze(1))
    return TrellisWeight(packed(symbols[back.cpu()], bits), scale.to(dtype).cpu())


def error_energy(weight: Tensor, hessian: Tensor, doubt: float = DOUBT) -> float:
    """Return the energy of outputs that errors as large as the weights would leave.

    Times one of `MEAN_ERRORS` it is what `quantize` leaves of it, about. Arguments as there.
    """
    factor, _, _ = _feedback(hessian, DAMPING, doubt)
    return float(weight.square().mean(1).sum() * factor.diagonal().square().reciprocal().sum())


def _feedback(hessian: Tensor, damping: float, doubt: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factor of the believed moments of rotated inputs, their order, the moments."""
    energy = hessian.diagonal().clone()
    moments = hessian * (1 - doubt)
    moments.diagonal().copy_(energy)
    moments = rotated(rotated(moments).T.contiguous()).T
    moments = (moments + moments.T) / 2
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    return inverse_factor(moments[order][:, order], damping)[0], order, moments


def _shares(counts: Tensor) -> Tensor:
    """Scale each block's counts to a mean of 1; none is 0, so that every value is near."""
    shares = counts / counts.mean(1, keepdim=True).clamp_min(1e-30)
    return shares.clamp_min(LEAST_SHARE)


def packed(symbols: Tensor, bits: int) -> Tensor:
    """Pack symbols (in_features, blocks * 64), one in a byte: (blocks, in_features, 8 * bits)."""
    sequences = symbols.view(len(symbols), -1, BLOCK).transpose(0, 1).numpy()
    planes = np.unpackbits(sequences[..., None], axis=-1, count=bits, bitorder="little")
    return torch.from_numpy(np.packbits(planes.reshape(*sequences.shape[:2], -1), -1, "little"))


def _engine() -> NativeEngine:
    """Return this thread's engine: weights are rounded in several threads at once."""
    if not hasattr(_OF_THREAD, "engine"):
        try:
            _OF_THREAD.engine = NativeEngine(load_library(), torch.get_num_threads())
        except LibraryError as error:
            raise QuantizeError(f"--method trellis needs the CPU library: {error}") from error
    engine: NativeEngine = _OF_THREAD.engine
    return engine
