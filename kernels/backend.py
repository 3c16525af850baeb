"""Chooses implementations of operations: one frozen table of functions per backend.

Every entry has a torch reference that is slow and obviously right; the other tables replace
entries of it. Choosing is explicit, by device, and never falls back in silence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.adapters import reference as reference_adapters
from appliance.kernels.attention import cpu as cpu_attention
from appliance.kernels.attention import reference as reference_attention
from appliance.kernels.cache.decoder_cache import allocate_blocks
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.expert_routing import reference as reference_routing
from appliance.kernels.gated_activation import cpu as cpu_activation
from appliance.kernels.gated_activation import reference as reference_activation
from appliance.kernels.gated_norm import reference as reference_gated_norm
from appliance.kernels.kv_seal import reference as reference_kv_seal
from appliance.kernels.kv_write import reference as reference_kv_write
from appliance.kernels.latent_attention import cpu as cpu_latents
from appliance.kernels.latent_attention import reference as reference_latents
from appliance.kernels.library_tiles import reference as reference_tiles
from appliance.kernels.norm_rope import cpu as cpu_norm_rope
from appliance.kernels.norm_rope import reference as reference_norm_rope
from appliance.kernels.operations import Backend
from appliance.kernels.packed_matmul import reference as reference_matmul
from appliance.kernels.penalties import cpu as cpu_penalties
from appliance.kernels.penalties import reference as reference_penalties
from appliance.kernels.recurrence import reference as reference_recurrence
from appliance.kernels.short_conv import reference as reference_short_conv
from appliance.kernels.soft_cap import reference as reference_soft_cap
from appliance.kernels.token_mask import reference as reference_token_mask
from appliance.kernels.token_scores import reference as reference_token_scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.kernels.activation import Gating
    from appliance.kernels.operations import Linear
    from appliance.kernels.weights.weight import Weight


REFERENCE = Backend(
    name="reference",
    prepare_linear=reference_matmul.prepare_linear,
    rms_norm=reference_norm_rope.rms_norm,
    layer_norm=reference_norm_rope.layer_norm,
    add_norm=reference_norm_rope.add_norm_with(reference_norm_rope.rms_norm),
    rotary=reference_norm_rope.rotary,
    gated_activation=reference_activation.gated_activation,
    activated=reference_activation.activated,
    gate_heads=reference_activation.gate_heads,
    soft_cap=reference_soft_cap.soft_cap,
    penalize=reference_penalties.penalize,
    mask_tokens=reference_token_mask.mask_tokens,
    score_tokens=reference_token_scores.score_tokens,
    write_kv=reference_kv_write.write_kv,
    rotate_and_write=reference_kv_write.rotate_and_write_with(
        reference_norm_rope.rms_norm, reference_norm_rope.rotary, reference_kv_write.write_kv
    ),
    seal_kv=reference_kv_seal.seal_moves,
    allocate_cache=allocate_blocks,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
    write_latents=reference_latents.write_latents_with(
        reference_norm_rope.rms_norm, reference_norm_rope.rotary, reference_kv_write.write_kv
    ),
    latent_attention=reference_latents.latent_attention_with(
        reference_norm_rope.rotary, reference_latents.attend_latents
    ),
    gated_delta=reference_recurrence.gated_delta,
    selective_scan=reference_recurrence.selective_scan,
    short_conv=reference_short_conv.short_conv,
    gated_norm=reference_gated_norm.gated_norm,
    choose=reference_routing.choose_with(reference_routing.router_logits, reference_routing.route),
    plan_adapters=reference_adapters.plan_adapters,
    add_adapters=reference_adapters.add_adapters,
    prepare_gated=lambda weight, bias, dtype, activation: None,
    prepare_table=lambda weight, dtype: None,
    widen_tiles=reference_tiles.widen,
)

# The reference KV write is a handful of torch calls; torch offers nothing faster.
CPU = replace(
    REFERENCE,
    name="cpu",
    prepare_linear=reference_matmul.dense_linear,
    rms_norm=cpu_norm_rope.rms_norm,
    add_norm=reference_norm_rope.add_norm_with(cpu_norm_rope.rms_norm),
    rotary=cpu_norm_rope.rotary,
    rotate_and_write=reference_kv_write.rotate_and_write_with(
        cpu_norm_rope.rms_norm, cpu_norm_rope.rotary, reference_kv_write.write_kv
    ),
    gated_activation=cpu_activation.gated_activation,
    penalize=cpu_penalties.penalize,
    plan_attention=cpu_attention.plan_attention,
    paged_attention=cpu_attention.paged_attention,
    write_latents=reference_latents.write_latents_with(
        cpu_norm_rope.rms_norm, cpu_norm_rope.rotary, reference_kv_write.write_kv
    ),
    latent_attention=reference_latents.latent_attention_with(
        cpu_norm_rope.rotary, cpu_latents.attend_latents
    ),
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
    from appliance.kernels.attention.launch import paged_attention
    from appliance.kernels.attention.timed_spans import SpanPlanner
    from appliance.kernels.expert_routing.launch import choose
    from appliance.kernels.fp8_matmul import launch as fp8_matmul
    from appliance.kernels.gated_activation.launch import activated, gate_heads, gated_activation
    from appliance.kernels.gated_norm.launch import gated_norm
    from appliance.kernels.grouped_matmul.launch import prepare_experts
    from appliance.kernels.int8_matmul.launch import round_prompts
    from appliance.kernels.kv_seal.launch import seal
    from appliance.kernels.kv_write.launch import rotate_and_write, write_kv
    from appliance.kernels.latent_attention.launch import latent_attention, write_latents
    from appliance.kernels.library_tiles.launch import widen
    from appliance.kernels.norm_rope.launch import add_norm, layer_norm, rms_norm
    from appliance.kernels.packed_matmul import launch as packed_matmul
    from appliance.kernels.penalties.launch import penalize
    from appliance.kernels.recurrence.launch import gated_delta, selective_scan
    from appliance.kernels.short_conv.launch import short_conv
    from appliance.kernels.soft_cap.launch import soft_cap
    from appliance.kernels.token_mask.launch import mask_tokens
    from appliance.kernels.weights.fp4 import Fp4Weight
    from appliance.kernels.weights.fp8 import Fp8Weight
    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.packed import PackedWeight

    def prepare_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        if isinstance(weight, Fp8Weight):
            return fp8_matmul.prepare_linear(weight, bias, dtype)
        return packed_matmul.prepare_linear(weight, bias, dtype)

    def prepare_gated(
        weight: Weight, bias: Tensor | None, dtype: torch.dtype, activation: Gating
    ) -> Linear | None:
        if not isinstance(weight, PackedWeight | Fp4Weight | GgmlWeight):
            return None
        if not packed_matmul.has_gated(weight, dtype):
            return None
        return packed_matmul.prepare_gate_up(weight, bias, dtype, activation)

    return replace(
        REFERENCE,
        name="triton",
        prepare_linear=prepare_linear,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        add_norm=add_norm,
        gated_activation=gated_activation,
        activated=activated,
        gate_heads=gate_heads,
        soft_cap=soft_cap,
        penalize=penalize,
        mask_tokens=mask_tokens,
        write_kv=write_kv,
        rotate_and_write=rotate_and_write,
        seal_kv=seal,
        allocate_cache=KVPages.allocate,
        plan_attention=SpanPlanner(),
        paged_attention=paged_attention,
        write_latents=write_latents,
        latent_attention=latent_attention,
        gated_delta=gated_delta,
        selective_scan=selective_scan,
        short_conv=short_conv,
        gated_norm=gated_norm,
        choose=choose,
        plan_adapters=plan_adapters,
        add_adapters=add_adapters,
        prepare_gated=prepare_gated,
        prepare_table=packed_matmul.prepare_table,
        widen_tiles=widen,
        prepare_experts=prepare_experts,
        round_prompts=round_prompts,
        stacks_shared=True,
    )
