"""The types of a step's operations, and the table that a backend fills with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from appliance.kernels.activation import Activation, Gating
    from appliance.kernels.adapters.factors import StackedFactors
    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.cache.sealed_blocks import SealedBlocks
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.grouped_matmul.sorted_pairs import SortedPairs
    from appliance.kernels.grouped_matmul.weights import StackedExperts
    from appliance.kernels.head_norms import HeadNorms
    from appliance.kernels.library_tiles.tiles import LinearTiles
    from appliance.kernels.norm_rope.weights import NormWeights
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.routing import Router
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.kernels.rows.state_spans import StateSpans
    from appliance.kernels.weights.weight import Weight


class MaskTokens(Protocol):
    """Bans tokens without waiting for the device; see `token_mask.reference`."""

    def __call__(self, logits: Tensor, rows: Tensor, words: Tensor) -> None: ...


class TokenScores(NamedTuple):
    """Natural log probabilities; NaN in a row whose logits are not finite."""

    chosen: Tensor  # (num_rows,) float32, of the given token
    top: Tensor  # (num_rows, count) float32, of the likeliest, in falling order
    top_ids: Tensor  # (num_rows, count) int64; among equals the lowest id comes first


class ScoreTokens(Protocol):
    """Scores a token per row without waiting for the device."""

    def __call__(self, logits: Tensor, targets: Tensor, count: int) -> TokenScores:
        """Score tokens.

        Args:
            logits: (num_rows, vocab_size) float32; not changed.
            targets: (num_rows,) int64, a token for each row.
            count: likeliest tokens to report; 0 reports none.
        """
        ...


class Linear(Protocol):
    """A weight in one backend's layout: x (num_tokens, in) -> (num_tokens, out), dtype of x."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: (num_tokens, in_features) -> (num_tokens, out_features)."""
        ...


class RowTable(Linear, Protocol):
    """A linear whose rows can be looked up: an embedding, and a head that is tied to it."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up: (num_rows,) integers -> (num_rows, in_features) in `dtype`."""
        ...


class ChosenExperts(NamedTuple):
    """The experts that a router chose for each token."""

    ids: Tensor  # (num_tokens, choices) int64, 0 is the first expert that is here
    weights: Tensor  # (num_tokens, choices) float32
    pairs: SortedPairs | None = None  # the same sorted by expert, if the backend needs that


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Weights of a router.

    Attributes:
        weight: (num_experts, hidden_size) float32; one row more with a gate.
        bias: (num_experts,) float32, or None; likewise.
        selection_bias: (num_experts,) float32, or None.
        expert_scale: (num_experts,) float32, or None.
    """

    weight: Tensor
    bias: Tensor | None
    selection_bias: Tensor | None
    expert_scale: Tensor | None


class Choose(Protocol):
    """Chooses the experts of each token, without waiting for the device."""

    def __call__(
        self,
        x: Tensor,  # (num_tokens, hidden_size)
        weights: RouterWeights,
        router: Router,
        held: range,
        *,
        shared: int = 0,
        has_gate: bool = False,
        timed: TimedChoices | None = None,
    ) -> tuple[ChosenExperts, Tensor | None]:
        """Choose; the arguments are described at `expert_routing.reference`."""
        ...


class Shared(NamedTuple):
    """Output of the MLP that all tokens pass through, to be added to the experts' sum."""

    rows: Tensor  # (num_tokens, hidden_size), in the type of activations
    gate: Tensor | None  # (num_tokens, 1) float32, the logit of a factor of each row


class RoutedMLPs(Protocol):
    """The MLPs of one layer that a router chooses from, as one operation."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weights and biases take."""
        ...

    @property
    def weighs_inputs(self) -> bool:
        """True if the weights of a choice multiply what experts read; see `StackedExperts`."""
        ...

    @property
    def timed(self) -> TimedChoices | None:
        """Choices of blocks of pairs that were timed; None where nothing is sorted."""
        ...

    def __call__(
        self,
        hidden: Tensor,  # (num_tokens, hidden_size)
        choice: ChosenExperts,
        shared: Shared | None = None,
    ) -> Tensor:  # (num_tokens, hidden_size), dtype of hidden
        """Sum each token's weighted expert outputs and what is shared, in float32.

        The host does not wait for the device. Of a part of the experts, other numbers add nothing;
        see `StackedExperts`.
        """
        ...


class GatedDeltaRule(Protocol):
    """Corrects a sequence's state by each row and reads it."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_key_heads, key_dim) float32
        key: Tensor,
        value: Tensor,  # (num_tokens, num_value_heads, value_dim) float32
        step: Tensor,  # (num_tokens, num_value_heads)
        share: Tensor,
        rates: Tensor,  # (num_value_heads,) float32
        bias: Tensor,
        state: Tensor,  # (num_slots, num_value_heads, key_dim, value_dim), updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_value_heads, value_dim) float32
        """Run the rule; the arguments are described at `recurrence.reference`."""
        ...


class SelectiveScan(Protocol):
    """Decays a sequence's state by each row, adds to it and reads it."""

    def __call__(
        self,
        value: Tensor,  # (num_tokens, num_heads, head_dim) float32
        key: Tensor,  # (num_tokens, num_groups, state_dim) float32
        query: Tensor,
        step: Tensor,  # (num_tokens, num_heads)
        rates: Tensor,  # (num_heads,) float32
        bias: Tensor,
        state: Tensor,  # (num_slots, num_heads, state_dim, head_dim), updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim) float32
        """Scan; the arguments are described at `recurrence.reference`."""
        ...


class ShortConvolution(Protocol):
    """Convolves each channel of a sequence over its latest rows, and keeps those."""

    def __call__(
        self,
        x: Tensor,  # (num_tokens, width)
        filters: Tensor,  # (width, taps) float32
        bias: Tensor | None,  # (width,) float32
        state: Tensor,  # (num_slots, taps - 1, width), updated
        spans: StateSpans,
        *,
        activates: bool = False,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # (num_tokens, width) float32; with gates of the dtype of x
        """Convolve; the arguments are described at `short_conv.reference`."""
        ...


class GatedNorm(Protocol):
    """Norms neighbours of what a state was read for, and gates them."""

    def __call__(
        self,
        x: Tensor,  # (num_tokens, dim) float32
        gate: Tensor,  # (num_tokens, dim)
        norm: NormWeights,
        dtype: torch.dtype,
        *,
        width: int,
        gates_first: bool,
        skip: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # (num_tokens, dim) of that dtype
        """Norm and gate; the arguments are described at `gated_norm.reference`."""
        ...


class AddNorm(Protocol):
    """Adds a layer's output to the stream, and norms the sum."""

    def __call__(
        self,
        added: Tensor,  # (num_tokens, dim)
        stream: Tensor,
        norm: NormWeights | None,
        *,
        post: NormWeights | None = None,
        beside: Tensor | None = None,
        parts: tuple[NormWeights, NormWeights] | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # the norm, the sum
        """Add and norm; see `norm_rope.reference.add_norm_with`."""
        ...


class GatedActivation(Protocol):
    """Computes act(gate) * up."""

    def __call__(
        self,
        gate_up: Tensor,  # (num_tokens, 2 * intermediate) side by side, or gate alone
        activation: Gating,
        up: Tensor | None = None,  # (num_tokens, intermediate), if it is apart
    ) -> Tensor:  # (num_tokens, intermediate)
        """Compute; see `gated_activation.reference`."""
        ...


class PagedAttention(Protocol):
    """Attends from every row to its own sequence's blocks."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, head_dim)
        cache: AnyLayerCache,  # this step's keys and values are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim), dtype of query
        """Attend; see `attention.reference` for the arguments."""
        ...


class AttentionOverLatents(Protocol):
    """Attends from every row's heads to the latents of its own sequence."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, plain + rotary)
        cos: Tensor,  # (num_tokens, rotary / 2) float32
        sin: Tensor,
        cache: AnyLayerCache,  # this step's tokens are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        keys: Tensor,  # (num_heads, plain, latent)
        values: Tensor,  # (num_heads, value, latent)
        scale: float,
        query_scale: Tensor | None = None,  # (num_tokens,) float32
    ) -> Tensor:  # (num_tokens, num_heads, value), dtype of query
        """Attend; see `latent_attention.reference.latent_attention_with`."""
        ...


class WriteLatents(Protocol):
    """Writes a step's latents to the cache, and norms those of queries."""

    def __call__(
        self,
        found: Tensor,  # (num_tokens, rank + width)
        cos: Tensor,  # (num_tokens, rotary / 2) float32
        sin: Tensor,
        cache: AnyLayerCache,
        slot_mapping: Tensor,  # (num_tokens,) int64
        norm: NormWeights,
        query_norm: NormWeights | None = None,
    ) -> Tensor | None:  # (num_tokens, rank)
        """Norm, rotate and write; see `latent_attention.reference.write_latents_with`."""
        ...


class RotateAndWrite(Protocol):
    """Brings a step's queries and keys into their final form, and writes keys and values."""

    def __call__(
        self,
        qkv: Tensor,  # (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        cos: Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor | None,  # (num_tokens,) int64; None: there are queries alone
        norms: HeadNorms | None = None,
        query_scale: Tensor | None = None,  # (num_tokens,) float32
        *,
        keys_are_values: bool = False,
    ) -> Tensor:  # queries, (num_tokens, num_heads, head_dim)
        """Norm, rotate and write; see `kv_write.reference.rotate_and_write_with`."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of a step: of the decoder, and of what follows on its logits."""

    name: str
    # weight (out, in) in any form, bias (out,) or None, activation dtype -> Linear
    prepare_linear: Callable[[Weight, Tensor | None, torch.dtype], Linear]
    # x (num_tokens, dim), weight (dim,) float32, eps -> (num_tokens, dim)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x (num_tokens, dim), weight and bias (dim,) float32, eps -> (num_tokens, dim)
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    add_norm: AddNorm
    # x (num_tokens, heads, head_dim), cos and sin (num_tokens, rotary_dim / 2) float32 -> like x
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated_activation: GatedActivation
    # x (num_tokens, width) -> like x
    activated: Callable[[Tensor, Activation], Tensor]
    # heads (num_tokens, num_heads, head_dim), gates of elements or of heads -> like heads
    gate_heads: Callable[[Tensor, Tensor], Tensor]
    # logits (num_rows, vocab_size), cap -> float32
    soft_cap: Callable[[Tensor, float], Tensor]
    penalize: Penalize
    mask_tokens: MaskTokens
    score_tokens: ScoreTokens
    # key, value (num_tokens, num_kv_heads, head_dim), cache, slot_mapping (num_tokens,)
    write_kv: Callable[[Tensor, Tensor, LayerCache, Tensor], None]
    rotate_and_write: RotateAndWrite
    # cache, (n, 2) int64: full open blocks, and the blocks to seal them into
    seal_kv: Callable[[SealedBlocks, Tensor], None]
    # format, num_blocks, block_size, num_kv_heads, head_dim, device -> one layer's cache
    allocate_cache: Callable[..., LayerCache]
    # once per step, shared by all layers; the second argument is the block size
    plan_attention: Callable[[RaggedBatch, int], object]
    paged_attention: PagedAttention
    write_latents: WriteLatents
    latent_attention: AttentionOverLatents
    gated_delta: GatedDeltaRule
    selective_scan: SelectiveScan
    short_conv: ShortConvolution
    gated_norm: GatedNorm
    choose: Choose
    # slots of the rows (num_tokens,) int32, number of slots -> once per step, for all layers
    plan_adapters: Callable[[Tensor, int], Any]
    # outputs, added to in place; inputs; factors of the place; what plan_adapters returned
    add_adapters: Callable[[Tensor, Tensor, StackedFactors, Any], None]
    # weight (gate over up, in), bias, activation dtype, activation -> act(x @ gate) * (x @ up) as
    # one operation, or None if there is none for such a weight
    prepare_gated: Callable[[Weight, Tensor | None, torch.dtype, Gating], Linear | None]
    # weight (rows, width), dtype of rows -> what looks them up, or None if torch does
    prepare_table: Callable[[Weight, torch.dtype], RowTable | None]
    # a weight as the CPU library holds it, on the device; dtype -> (out_features, in_features)
    widen_tiles: Callable[[LinearTiles, torch.dtype], Tensor]
    # all experts of a layer, activation dtype -> one operation, or None if none covers such
    # weights: then experts run one after another
    prepare_experts: Callable[[StackedExperts, torch.dtype], RoutedMLPs | None] | None = None
    # a linear, and the row from which on all belong to prompts -> one that rounds those rows to
    # int8 where that is computed to be faster, or None if there is none for such a linear
    round_prompts: Callable[[object, int], Linear | None] | None = None
    # a shared MLP may be experts that every token takes; not if adapters add to it
    stacks_shared: bool = False
