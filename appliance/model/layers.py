"""One decoder layer, in the order of the paper: attention, then the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Activation
    from appliance.kernels.backend import Backend, Linear
    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.model.attention import Attention
    from appliance.model.norm import Norm
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """act(gate(x)) * up(x), for backends without a fused operation."""

    backend: Backend
    activation: Activation
    gate_up: Linear  # hidden to gate, then up

    @property
    def in_features(self) -> int:
        """Width of x."""
        return self.gate_up.in_features

    @property
    def out_features(self) -> int:
        """Width of the result."""
        return self.gate_up.out_features // 2

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.gate_up.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        return self.backend.gated_activation(self.gate_up(x), self.activation)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x))."""

    gated: Linear  # hidden to act(gate) * up
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape."""
        return self.down(self.gated(hidden))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP on a residual stream.

    A layer takes its input normed already and norms its output for the next layer, so that each
    addition to the stream is one operation with the norm after it.

    Attributes:
        attention_post_norm: of attention's output; set together with `mlp_post_norm`.
        mlp_norm: of the stream before the MLP.
        mlp_post_norm: of the MLP's output.
        next_norm: of the stream after this layer: the next layer's, or the decoder's last.
    """

    backend: Backend
    attention: Attention
    mlp: MLP
    mlp_norm: Norm
    next_norm: Norm
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None

    def __call__(
        self, hidden: Tensor, stream: Tensor, step: Step, cache: AnyLayerCache, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: (num_tokens, hidden_size), the stream under this layer's first norm.
            stream: (num_tokens, hidden_size), the sum so far.
            step: data shared by the step's layers.
            cache: this layer's blocks.
            rows: the only rows needed after attention; None means all.

        Returns:
            Hidden and stream for the next layer, of these rows.
        """
        added = self.attention(hidden, step, cache)
        if rows is not None:
            added, stream = added.index_select(0, rows), stream.index_select(0, rows)
            if not rows.shape[0]:
                return added, stream
        hidden, stream = self._add(added, stream, self.attention_post_norm, self.mlp_norm)
        return self._add(self.mlp(hidden), stream, self.mlp_post_norm, self.next_norm)

    def _add(
        self, added: Tensor, stream: Tensor, post_norm: Norm | None, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        if post_norm is not None:
            added = self.backend.rms_norm(added, post_norm.weight, post_norm.eps)
        return self.backend.add_rms_norm(added, stream, norm.weight, norm.eps)
