"""Chooses implementations of operations: one frozen table of functions per backend.

Every entry has a torch reference that is slow and obviously right; the other tables replace
entries of it. Choosing is explicit, by device, and never falls back in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from appliance.kernels.adapters import reference as reference_adapters
from appliance.kernels.decoder_cache import allocate_blocks
from appliance.kernels.gated_activation import cpu as cpu_activation
from appliance.kernels.gated_activation import reference as reference_activation
from appliance.kernels.gated_delta import reference as reference_gated_delta
from appliance.kernels.kv_cache import KVPages
from appliance.kernels.kv_seal import reference as reference_kv_seal
from appliance.kernels.kv_write import reference as reference_kv_write
from appliance.kernels.library_tiles import reference as reference_tiles
from appliance.kernels.norm_rope import cpu as cpu_norm_rope
from appliance.kernels.norm_rope import reference as reference_norm_rope
from appliance.kernels.packed_matmul import reference as reference_matmul
from appliance.kernels.paged_attention import cpu as cpu_attention
from appliance.kernels.paged_attention import reference as reference_attention
from appliance.kernels.selective_scan import reference as reference_selective_scan
from appliance.kernels.short_conv import reference as reference_short_conv
from appliance.kernels.soft_cap import reference as reference_soft_cap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from appliance.kernels.activation import Gating
    from appliance.kernels.adapters.factors import StackedFactors
    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.grouped_matmul.weights import StackedExperts
    from appliance.kernels.kv_cache import LayerCache
    from appliance.kernels.kv_write.head_norms import HeadNorms
    from appliance.kernels.library_tiles.tiles import LinearTiles
    from appliance.kernels.ragged import RaggedBatch
    from appliance.kernels.sealed_blocks import SealedBlocks
    from appliance.kernels.state_spans import StateSpans
    from appliance.kernels.weight import Weight


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


class RoutedMLPs(Protocol):
    """The MLPs of one layer that a router chooses from, as one operation."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weights and biases take."""
        ...

    def __call__(
        self,
        hidden: Tensor,  # (num_tokens, hidden_size)
        ids: Tensor,  # (num_tokens, top_k) int64
        weights: Tensor,  # (num_tokens, top_k) float32
    ) -> Tensor:  # (num_tokens, hidden_size) float32
        """Sum each token's weighted expert outputs, without waiting for the device.

        Of a part of the experts, other numbers add nothing; see `StackedExperts`.
        """
        ...


class GatedDeltaRule(Protocol):
    """Corrects a sequence's state by each row and reads it."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_key_heads, key_dim) float32
        key: Tensor,
        value: Tensor,  # (num_tokens, num_value_heads, value_dim) float32
        log_decay: Tensor,  # (num_tokens, num_value_heads) float32
        beta: Tensor,
        state: Tensor,  # (num_slots, num_value_heads, key_dim, value_dim) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_value_heads, value_dim) float32
        """Run the rule; the arguments are described at `gated_delta.reference`."""
        ...


class SelectiveScan(Protocol):
    """Decays a sequence's state by each row, adds to it and reads it."""

    def __call__(
        self,
        value: Tensor,  # (num_tokens, num_heads, head_dim) float32
        key: Tensor,  # (num_tokens, num_groups, state_dim) float32
        query: Tensor,
        size: Tensor,  # (num_tokens, num_heads) float32
        rates: Tensor,  # (num_heads,) float32
        state: Tensor,  # (num_slots, num_heads, state_dim, head_dim) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim) float32
        """Scan; the arguments are described at `selective_scan.reference`."""
        ...


class ShortConvolution(Protocol):
    """Convolves each channel of a sequence over its latest rows, and keeps those."""

    def __call__(
        self,
        x: Tensor,  # (num_tokens, width)
        filters: Tensor,  # (width, taps) float32
        bias: Tensor | None,  # (width,) float32
        state: Tensor,  # (num_slots, taps - 1, width) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, width) float32
        """Convolve; the arguments are described at `short_conv.reference`."""
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
    ) -> Tensor:  # (num_tokens, num_heads, head_dim), dtype of query
        """Attend; see `paged_attention.reference` for the arguments."""
        ...


class RotateAndWrite(Protocol):
    """Brings a step's queries and keys into their final form, and writes keys and values."""

    def __call__(
        self,
        qkv: Tensor,  # (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        cos: Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,  # (num_tokens,) int64
        norms: HeadNorms | None = None,
    ) -> Tensor:  # queries, (num_tokens, num_heads, head_dim)
        """Norm, rotate and write; see `kv_write.reference.rotate_and_write_with`."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of a decoder step."""

    name: str
    # weight (out, in) in any form, bias (out,) or None, activation dtype -> Linear
    prepare_linear: Callable[[Weight, Tensor | None, torch.dtype], Linear]
    # x (num_tokens, dim), weight (dim,) float32, eps -> (num_tokens, dim)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x, residual, weight, eps -> (rms_norm(x + residual), x + residual)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # x (num_tokens, heads, head_dim), cos and sin (num_tokens, rotary_dim / 2) float32 -> like x
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    # gate and up side by side (num_tokens, 2 * intermediate) -> (num_tokens, intermediate)
    gated_activation: Callable[[Tensor, Gating], Tensor]
    # logits (num_rows, vocab_size), cap -> float32
    soft_cap: Callable[[Tensor, float], Tensor]
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
    gated_delta: GatedDeltaRule
    selective_scan: SelectiveScan
    short_conv: ShortConvolution
    # slots of the rows (num_tokens,) int32, number of slots -> once per step, for all layers
    plan_adapters: Callable[[Tensor, int], Any]
    # outputs, added to in place; inputs; factors of the place; what plan_adapters returned
    add_adapters: Callable[[Tensor, Tensor, StackedFactors, Any], None]
    # weight (gate over up, in), bias, activation dtype, activation -> act(x @ gate) * (x @ up) as
    # one operation, or None if there is none for such a weight
    prepare_gated: Callable[[Weight, Tensor | None, torch.dtype, Gating], Linear | None]
    # a weight as the CPU library holds it, on the device; dtype -> (out_features, in_features)
    widen_tiles: Callable[[LinearTiles, torch.dtype], Tensor]
    # all experts of a layer, activation dtype -> one operation, or None if none covers such
    # weights: then experts run one after another
    prepare_experts: Callable[[StackedExperts, torch.dtype], RoutedMLPs | None] | None = None


REFERENCE = Backend(
    name="reference",
    prepare_linear=reference_matmul.prepare_linear,
    rms_norm=reference_norm_rope.rms_norm,
    add_rms_norm=reference_norm_rope.add_rms_norm,
    rotary=reference_norm_rope.rotary,
    gated_activation=reference_activation.gated_activation,
    soft_cap=reference_soft_cap.soft_cap,
    write_kv=reference_kv_write.write_kv,
    rotate_and_write=reference_kv_write.rotate_and_write_with(
        reference_norm_rope.rms_norm, reference_norm_rope.rotary, reference_kv_write.write_kv
    ),
    seal_kv=reference_kv_seal.seal_moves,
    allocate_cache=allocate_blocks,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
    gated_delta=reference_gated_delta.gated_delta,
    selective_scan=reference_selective_scan.selective_scan,
    short_conv=reference_short_conv.short_conv,
    plan_adapters=reference_adapters.plan_adapters,
    add_adapters=reference_adapters.add_adapters,
    prepare_gated=lambda weight, bias, dtype, activation: None,
    widen_tiles=reference_tiles.widen,
)

# The reference KV write is a handful of torch calls; torch offers nothing faster.
CPU = replace(
    REFERENCE,
    name="cpu",
    prepare_linear=reference_matmul.dense_linear,
    rms_norm=cpu_norm_rope.rms_norm,
    add_rms_norm=cpu_norm_rope.add_rms_norm,
    rotary=cpu_norm_rope.rotary,
    rotate_and_write=reference_kv_write.rotate_and_write_with(
        cpu_norm_rope.rms_norm, cpu_norm_rope.rotary, reference_kv_write.write_kv
    ),
    gated_activation=cpu_activation.gated_activation,
    plan_attention=cpu_attention.plan_attention,
    paged_attention=cpu_attention.paged_attention,
)


def select_backend(device: torch.device, choice: str = "auto") -> Backend:
    """Choose the operations for a device.

    Args:
        device: where the weights, the cache and the activations are.
        choice: "auto" takes the fastest for the device, "reference" the plain torch functions,
            which run anywhere.

    Raises:
        ValueError: the choice or the device is unknown.
    """
    if choice == "reference":
        return REFERENCE
    if choice == "auto" and device.type == "cpu":
        return CPU
    if choice == "auto" and device.type == "cuda":
        return triton_backend()
    msg = (
        f"no kernels for device {device} with choice {choice!r}: "
        "'auto' serves cpu and cuda devices, 'reference' any device"
    )
    raise ValueError(msg)


def triton_backend() -> Backend:
    """Build the table of Triton's kernels; imports Triton, as only a box with a GPU does.

    The other entries are the references, run on the device.
    """
    from appliance.kernels.adapters.launch import add_adapters, plan_adapters
    from appliance.kernels.fp4 import Fp4Weight
    from appliance.kernels.fp8 import Fp8Weight
    from appliance.kernels.fp8_matmul import launch as fp8_matmul
    from appliance.kernels.gated_activation.launch import gated_activation
    from appliance.kernels.gated_delta.launch import gated_delta
    from appliance.kernels.grouped_matmul.launch import prepare_experts
    from appliance.kernels.kv_seal.launch import seal
    from appliance.kernels.kv_write.launch import rotate_and_write, write_kv
    from appliance.kernels.library_tiles.launch import widen
    from appliance.kernels.norm_rope.launch import add_rms_norm, rms_norm
    from appliance.kernels.packed import PackedWeight
    from appliance.kernels.packed_matmul import launch as packed_matmul
    from appliance.kernels.paged_attention.launch import paged_attention, plan_attention
    from appliance.kernels.selective_scan.launch import selective_scan
    from appliance.kernels.short_conv.launch import short_conv
    from appliance.kernels.soft_cap.launch import soft_cap

    def prepare_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        if isinstance(weight, Fp8Weight):
            return fp8_matmul.prepare_linear(weight, bias, dtype)
        return packed_matmul.prepare_linear(weight, bias, dtype)

    def prepare_gated(
        weight: Weight, bias: Tensor | None, dtype: torch.dtype, activation: Gating
    ) -> Linear | None:
        if not isinstance(weight, PackedWeight | Fp4Weight):
            return None
        if not packed_matmul.has_gated(weight, dtype, activation):
            return None
        return packed_matmul.prepare_gate_up(weight, bias, dtype)

    return replace(
        REFERENCE,
        name="triton",
        prepare_linear=prepare_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_activation=gated_activation,
        soft_cap=soft_cap,
        write_kv=write_kv,
        rotate_and_write=rotate_and_write,
        seal_kv=seal,
        allocate_cache=KVPages.allocate,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
        gated_delta=gated_delta,
        selective_scan=selective_scan,
        short_conv=short_conv,
        plan_adapters=plan_adapters,
        add_adapters=add_adapters,
        prepare_gated=prepare_gated,
        widen_tiles=widen,
        prepare_experts=prepare_experts,
    )
