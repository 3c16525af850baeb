"""One decoder layer: attention or another mixer, then the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.adapters.torch_slots import run_adapted
from appliance.model.attention import Attention, LatentAttention
from appliance.model.experts import Experts
from appliance.model.recurrent import Mamba2

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Activation, Gating
    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.operations import Backend, Linear
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.embedding import LayerInput
    from appliance.model.norm import Norm
    from appliance.model.recurrent import GatedDelta, ShortConv
    from appliance.model.shard.joint import Joint
    from appliance.model.step import Step

    Mixer: TypeAlias = Attention | LatentAttention | ShortConv | GatedDelta | Mamba2
    # Blocks of attention, or tensors (num_slots, ...) of a recurrent layer's state; none
    # without a mixer.
    MixerCache: TypeAlias = AnyLayerCache | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """act(gate(x)) * up(x), for backends without a fused operation."""

    backend: Backend
    activation: Gating
    gate_up: Linear  # hidden to gate, then up

    @property
    def in_features(self) -> int:
        return self.gate_up.in_features

    @property
    def out_features(self) -> int:
        return self.gate_up.out_features // 2

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        gate_up = run_adapted(self.gate_up, x, adapters, AdapterPlace.INTO_MLP)
        return self.backend.gated_activation(gate_up, self.activation)


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """act(up(x))."""

    backend: Backend
    activation: Activation
    up: Linear

    @property
    def in_features(self) -> int:
        return self.up.in_features

    @property
    def out_features(self) -> int:
        return self.up.out_features

    @property
    def nbytes(self) -> int:
        return self.up.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        return self.backend.activated(self.up(x), self.activation)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    middle: Linear  # hidden to the input of down
    down: Linear

    def __call__(self, hidden: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape."""
        if adapters is None or isinstance(self.middle, ActivatedLinear):
            return self.down(self.middle(hidden))
        assert isinstance(self.middle, GatedLinear), "adapters change what a fused gate has gated"
        return run_adapted(
            self.down, self.middle(hidden, adapters), adapters, AdapterPlace.OUT_OF_MLP
        )


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Mixer and MLP on a residual stream; either may be missing.

    A layer's input is already normed, and the layer norms its output for the next one, so each
    addition to the stream is one operation with the norm after it.

    Attributes:
        mixer_post_norm: of the mixer's output; set together with `mlp_post_norm`.
        mlp_norm: of the stream between mixer and MLP, or before both if they are parallel; None:
            the MLP reads the stream itself.
        mlp_post_norm: of the MLP's output.
        next_norm: of the stream after this layer: the next layer's, or the decoder's last; None:
            the next layer reads the stream itself.
        cache_place: index of its cache among all layers' caches; None without a mixer.
        token_input: adds the layer's input from the tokens.
        output_scale: multiplies the stream at the end.
        is_parallel: the MLP reads the stream before the mixer; without `mlp_norm`, it reads the
            mixer's input.
        replaces: a norm of the stream replaces the stream.
        mixer_joint: sums the ranks' parts of the mixer; None if this is all of it.
        mlp_joint: the same for the MLP.
        parts: norms of what the chosen experts say and of what the shared MLP does, which are
            added then; the norms of `mlp_norm` are those of MLP, router and experts.
    """

    backend: Backend
    mixer: Mixer | None
    mlp: MLP | Experts | None
    mlp_norm: Norm | None
    next_norm: Norm | None
    mixer_post_norm: Norm | None
    mlp_post_norm: Norm | None
    index: int
    cache_place: int | None
    token_input: LayerInput | None = None
    output_scale: float | None = None
    is_parallel: bool = False
    replaces: bool = False
    mixer_joint: Joint | None = None
    mlp_joint: Joint | None = None
    parts: tuple[Norm, Norm] | None = None

    def __call__(
        self,
        hidden: Tensor,
        stream: Tensor,
        step: Step,
        cache: MixerCache | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: (num_tokens, hidden_size), the stream after this layer's first norm.
            stream: (num_tokens, hidden_size), the sum so far.
            cache: of the mixer; None without one.
            rows: rows needed after the mixer; None means all.

        Returns:
            Hidden and stream of these rows for the next layer.
        """
        adapted = step.adapted
        adapters = None if adapted is None else adapted.at(self.index)
        of_mlp = hidden
        if self.mixer is not None:
            assert cache is not None
            hidden = self._mix(self.mixer, hidden, step, cache, adapters)
        if rows is not None:
            hidden, stream = hidden.index_select(0, rows), stream.index_select(0, rows)
            if not rows.shape[0]:
                return hidden, stream
        if self.is_parallel:
            read = of_mlp if rows is None else of_mlp.index_select(0, rows)
            mixed, beside = self._both(hidden, read, stream, adapters)
            return self._finish(mixed, stream, None, step, rows, beside=beside)
        if self.mixer is not None:
            hidden = _summed(hidden, self.mixer_joint)
            if self.mlp is None:
                return self._finish(hidden, stream, self.mixer_post_norm, step, rows)
            hidden, stream = self._add(hidden, stream, self.mixer_post_norm, self.mlp_norm)
        if self.mlp is None:
            return hidden, stream
        if adapted is not None and rows is not None:
            adapters = adapted.select(rows).at(self.index)
        post, parts = self.mlp_post_norm, self.parts
        if parts is None:
            added = _summed(self.mlp(hidden, adapters), self.mlp_joint)
            return self._finish(added, stream, post, step, rows)
        assert isinstance(self.mlp, Experts)
        both = self.mlp.normed_apart(hidden, adapters)
        added, beside = (_summed(said, self.mlp_joint) for said in both)
        return self._finish(added, stream, post, step, rows, beside=beside, parts=parts)

    def normed(self, stream: Tensor) -> Tensor:
        """Norm the stream after this layer for the next one, where more was added to it."""
        return stream if self.next_norm is None else self.next_norm.of(stream, self.backend)

    def _both(
        self, mixed: Tensor, read: Tensor, stream: Tensor, adapters: LayerAdapters | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of mixer and parallel MLP, which reads `read`; as one if ranks add."""
        assert self.mlp is not None
        if self.mlp_norm is not None:
            read = self.mlp_norm.of(stream, self.backend)
        added = self.mlp(read, adapters)
        if self.mixer_joint is not None and self.mlp_joint is not None:
            return self.mlp_joint.sum(mixed + added), None
        return _summed(mixed, self.mixer_joint), _summed(added, self.mlp_joint)

    @staticmethod
    def _mix(
        mixer: Mixer,
        hidden: Tensor,
        step: Step,
        cache: MixerCache,
        adapters: LayerAdapters | None,
    ) -> Tensor:
        if isinstance(mixer, Attention | LatentAttention):
            assert not isinstance(cache, tuple)
            if isinstance(mixer, LatentAttention):
                return mixer(hidden, step, cache)
            return mixer(hidden, step, cache, adapters)
        assert isinstance(cache, tuple)
        if isinstance(mixer, Mamba2):
            return mixer(hidden, step, cache)
        return mixer(hidden, step, cache, adapters)

    def _finish(
        self,
        added: Tensor,
        stream: Tensor,
        post_norm: Norm | None,
        step: Step,
        rows: Tensor | None,
        *,
        beside: Tensor | None = None,
        parts: tuple[Norm, Norm] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add what is last, with the layer's input from the tokens, and scale the stream."""
        scale, norm = self.output_scale, self.next_norm
        if self.token_input is None:
            return self._add(added, stream, post_norm, norm, beside, parts, scale)
        _, stream = self._add(added, stream, post_norm, None, beside, parts)
        assert step.token_inputs is not None
        inputs = step.token_inputs[:, self.index]
        added = self.token_input(stream, inputs if rows is None else inputs[rows])
        return self._add(added, stream, self.token_input.norm, norm, scale=scale)

    def _add(
        self,
        added: Tensor,
        stream: Tensor,
        post_norm: Norm | None,
        norm: Norm | None,
        beside: Tensor | None = None,
        parts: tuple[Norm, Norm] | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next norm of the sum, and the stream."""
        if post_norm is not None and post_norm.bias is not None:
            assert beside is None, "a LayerNorm of two parts"
            added, post_norm = post_norm.of(added, self.backend), None
        hidden, total = self.backend.add_norm(
            added, stream, norm, post=post_norm, beside=beside, parts=parts, scale=scale
        )
        if hidden is None:
            return total, total
        return hidden, hidden if self.replaces else total


def _summed(said: Tensor, joint: Joint | None) -> Tensor:
    """Add up what the ranks' parts say; without a joint it is all there is."""
    return said if joint is None else joint.sum(said)
