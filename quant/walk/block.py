"""A decoder layer with linears that record their inputs and can be changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.model.attention import Attention
from appliance.model.layers import MLP, GatedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from appliance.kernels.operations import Backend
    from appliance.kernels.weights.weight import Weight
    from appliance.model.layers import DecoderLayer
    from appliance.model.norm import Norm


class Moments:
    """Second moments and mean magnitude of a linear's inputs."""

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.tokens = 0
        self._are_means = False
        self._square = torch.zeros((in_features, in_features), device=device)
        self._magnitude = torch.zeros(in_features, device=device)

    def add(self, x: Tensor) -> None:
        """Add x (num_tokens, in_features) float32; not allowed once the means are read."""
        assert not self._are_means
        self.tokens += x.shape[0]
        self._square.addmm_(x.T, x)
        self._magnitude += x.abs().sum(0)

    @property
    def hessian(self) -> Tensor:
        """Mean of x x^T, (in_features, in_features) float32."""
        self._divide()
        return self._square

    @property
    def magnitude(self) -> Tensor:
        """Mean of |x|, (in_features,) float32."""
        self._divide()
        return self._magnitude

    def _divide(self) -> None:
        """Turn sums into means in place, without memory for a second matrix."""
        if not self._are_means:
            self._square.div_(max(self.tokens, 1))
            self._magnitude.div_(max(self.tokens, 1))
            self._are_means = True


class AllInputsSeen(Exception):  # noqa: N818 - ends a layer early; no error
    """The last observed linear got its input."""


class ObservedLinear:
    """A `kernels.operations.Linear` in dense float32 that can be observed and changed.

    Args:
        weight: (out_features, in_features) float32; owned by this linear.
        bias: (out_features,) float32 or None; likewise.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.moments: Moments | None = None  # of its inputs, if set
        self.is_last_watched = False
        self.slopes: Tensor | None = None  # sums of squares by output, collected if set

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        if self.moments is not None:
            self.moments.add(x)
            if self.is_last_watched:
                raise AllInputsSeen
        y = functional.linear(x, self.weight, self.bias)
        if self.slopes is not None:
            y.register_hook(self._collect)
        return y

    def _collect(self, slope: Tensor) -> None:
        assert self.slopes is not None
        self.slopes += slope.square().sum(0)

    def scale_inputs(self, scales: Tensor) -> None:
        """Multiply the columns by (in_features,); from now on inputs come divided by it."""
        self.weight.mul_(scales)

    def scale_outputs(self, rows: slice, scales: Tensor) -> None:
        """Divide some rows and their biases by (rows,)."""
        self.weight[rows].div_(scales.unsqueeze(1))
        if self.bias is not None:
            self.bias[rows].div_(scales)


def observed_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> ObservedLinear:
    """Wrap a weight for observation, in place; a `Backend.prepare_linear`."""
    assert isinstance(weight, Tensor), "FloatReader makes weights dense"
    return ObservedLinear(weight, None if bias is None else bias.to(dtype))


def observing(backend: Backend) -> Backend:
    """Return the backend with observed linears."""
    return replace(backend, name=f"{backend.name}, observed", prepare_linear=observed_linear)


def observe_calls(
    linears: list[ObservedLinear], device: torch.device, calls: Iterable[Callable[[], object]]
) -> list[Moments]:
    """Make calls, each up to the last of these linears; return the moments of all inputs."""
    moments = [Moments(linear.in_features, device) for linear in linears]
    for linear, seen in zip(linears, moments, strict=True):
        linear.moments = seen
    linears[-1].is_last_watched = True
    try:
        for call in calls:
            with suppress(AllInputsSeen):
                call()
    finally:
        linears[-1].is_last_watched = False
        for linear in linears:
            linear.moments = None
    return moments


@dataclass(frozen=True, slots=True)
class TransformerBlock:
    """A layer and, if it is plain, its linears in the order of use.

    Attributes:
        layer: computes all but the norm before it.
    """

    layer: DecoderLayer
    mixer_norm: Norm

    @property
    def attention(self) -> Attention:
        assert isinstance(self.layer.mixer, Attention), "recurrent layers are refused before"
        return self.layer.mixer

    @property
    def qkv(self) -> ObservedLinear:
        return _observed(self.attention.qkv)

    @property
    def output(self) -> ObservedLinear:
        return _observed(self.attention.output)

    @property
    def gate_up(self) -> ObservedLinear:
        middle = self._mlp.middle
        assert isinstance(middle, GatedLinear), middle
        return _observed(middle.gate_up)

    @property
    def down(self) -> ObservedLinear:
        return _observed(self._mlp.down)

    @property
    def mlp_norm(self) -> Norm:
        assert self.layer.mlp_norm is not None, "layers without one of them are refused before"
        return self.layer.mlp_norm

    @property
    def _mlp(self) -> MLP:
        assert isinstance(self.layer.mlp, MLP), "experts are refused before"
        return self.layer.mlp

    def linears(self) -> Iterator[ObservedLinear]:
        yield from (self.qkv, self.output, self.gate_up, self.down)


def _observed(linear: object) -> ObservedLinear:
    assert isinstance(linear, ObservedLinear), linear
    return linear
