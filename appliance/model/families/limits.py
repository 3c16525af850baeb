"""Bounds the numbers in a model's settings, which come from an untrusted file.

Each number has a range, and `check_spec` checks them together, before anything is allocated and
before a number reaches the C library or a kernel, which take 32-bit integers and floats. Knows no
family.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.model.spec import ExpertsSpec, LatentAttentionSpec, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.spec import DecoderSpec


class Range(NamedTuple):
    least: float
    most: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most


_VOCABULARY = Range(1, 2**22)  # the largest in use have under 2**19 tokens
_WIDTH = Range(1, 2**17)
_MIDDLE = Range(1, 2**20)
_LAYERS = Range(1, 1024)
_HEADS = Range(1, 1024)
_HEAD_WIDTH = Range(1, 1024)
_TAPS = Range(2, 16)  # positions that a convolution reads
_CONTEXT = Range(2, 2**24)  # RoPE scalings divide by its logarithm
_ANY_COUNT = Range(1, 2**31 - 1)  # only compared with positions or layers
_EXPERTS = Range(1, 4096)
_EPSILON = Range(1e-20, 1.0)
_THETA = Range(1.5, 1e15)  # 1 would make all frequencies equal
_FACTOR = Range(1e-6, 1e6)
_SHARE = Range(0.0, 1e6)  # 0 is none

# Names in config.json and, without the architecture prefix, in GGUF metadata.
RANGES: dict[str, Range] = {
    "vocab_size": _VOCABULARY,
    "draft_vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "embedding_length": _WIDTH,
    "intermediate_size": _MIDDLE,
    "feed_forward_length": _MIDDLE,
    "block_ff_dim": _MIDDLE,
    "ffn_dim": _MIDDLE,
    "ffn_hidden_size": _MIDDLE,
    "hidden_dim": _MIDDLE,
    "relative_attention_num_buckets": Range(1, 4096),
    "word_embed_proj_dim": _WIDTH,
    "num_kv_heads": _HEADS,
    "num_ln_in_parallel_attn": Range(1, 2),
    "block_multiple_of": _MIDDLE,
    "block_ffn_dim_multiplier": Range(1e-2, 1e2),
    # of vision towers
    "patch_size": Range(1, 64),
    "temporal_patch_size": Range(1, 16),
    "image_size": Range(1, 2**14),
    "num_patches": Range(1, 2**20),
    "num_position_embeddings": Range(1, 2**20),
    "position_embedding_size": Range(1, 2**20),
    "mm_posemb_size": Range(1, 2**20),
    "mm_embed_dim": Range(1, 2**17),
    "mm_tokens_per_image": Range(1, 2**14),
    "spatial_merge_size": Range(1, 16),
    "pooling_kernel_size": Range(1, 16),
    "embed_dim": _WIDTH,
    "mlp_ratio": Range(1e-2, 1e2),
    "window_size": Range(1, 2**14),
    "out_hidden_size": _WIDTH,
    "downsample_ratio": Range(1 / 16, 1.0),
    "mrope_section": _HEAD_WIDTH,
    "scale_factor": Range(1, 16),
    "projector.scale_factor": Range(1, 16),
    "projection_dim": _WIDTH,
    "n_wa_pattern": _LAYERS,
    "downsample_factor": Range(1, 16),
    "depth": _LAYERS,
    "num_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "block_count": _LAYERS,
    "num_attention_heads": _HEADS,
    "attention.head_count": _HEADS,
    "num_key_value_heads": _HEADS,
    "attention.head_count_kv": _HEADS,
    "head_dim": _HEAD_WIDTH,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _HEAD_WIDTH,
    "linear_value_head_dim": _HEAD_WIDTH,
    "linear_conv_kernel_dim": _TAPS,
    "full_attention_interval": _LAYERS,
    "ssm.group_count": _HEADS,
    "ssm.time_step_rank": _HEADS,
    "ssm.state_size": _HEAD_WIDTH,
    "ssm.inner_size": _MIDDLE,
    "ssm.conv_kernel": _TAPS,
    "mtp_num_hidden_layers": Range(0, 1024),
    "global_head_dim": _HEAD_WIDTH,
    "num_sliding_attention_heads": _HEADS,
    "share_expert_dim": _MIDDLE,
    "moe_router_scaling_factor": _FACTOR,
    "intermediate_size_mlp": _MIDDLE,
    "interleave_moe_layer_step": _ANY_COUNT,
    "attention_chunk_size": _CONTEXT,
    "attention.chunk_size": _CONTEXT,
    "floor_scale": _CONTEXT,
    "attn_scale": _SHARE,
    "num_global_key_value_heads": _HEADS,
    "num_kv_shared_layers": Range(0, 1023),
    "hidden_size_per_layer_input": Range(0, 2**14),
    "vocab_size_per_layer_input": _VOCABULARY,
    "top_k_experts": _EXPERTS,
    "embedding_length_per_layer_input": Range(0, 2**14),
    "attention.shared_kv_layers": Range(0, 1023),
    "altup.active_idx": Range(0, 15),
    "altup.num_inputs": Range(2, 16),
    "activation_sparsity_scale": Range(-math.inf, 10.0),
    "attention.key_length_swa": _HEAD_WIDTH,
    "attention.value_length_swa": _HEAD_WIDTH,
    "rope.dimension_count_swa": _HEAD_WIDTH,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": Range(2, 2**14),
    "index_topk": _CONTEXT,
    "qk_nope_head_dim": _HEAD_WIDTH,
    "qk_rope_head_dim": _HEAD_WIDTH,
    "v_head_dim": _HEAD_WIDTH,
    "mamba_n_heads": _HEADS,
    "mamba_num_heads": _HEADS,
    "mamba_d_head": _HEAD_WIDTH,
    "mamba_head_dim": _HEAD_WIDTH,
    "mamba_n_groups": _HEADS,
    "n_groups": _HEADS,
    "mamba_d_state": _HEAD_WIDTH,
    "ssm_state_size": _HEAD_WIDTH,
    "mamba_d_conv": _TAPS,
    "conv_kernel": _TAPS,
    "mamba_expand": Range(1, 64),
    "conv_L_cache": _TAPS,
    "shortconv.l_cache": _TAPS,
    "attention.key_length": _HEAD_WIDTH,
    "attention.value_length": _HEAD_WIDTH,
    "rope.dimension_count": _HEAD_WIDTH,
    "max_position_embeddings": _CONTEXT,
    "original_max_position_embeddings": _CONTEXT,
    "context_length": _CONTEXT,
    "rope.scaling.original_context_length": _CONTEXT,
    "sliding_window": _ANY_COUNT,
    "attention.sliding_window": _ANY_COUNT,
    "sliding_window_pattern": _ANY_COUNT,
    "no_rope_layer_interval": _ANY_COUNT,
    "alpha": _FACTOR,
    "rotary_dim": _HEAD_WIDTH,
    "attention.sliding_window_pattern": _ANY_COUNT,
    "max_window_layers": Range(0, 2**31 - 1),
    "rms_norm_eps": _EPSILON,
    "norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "norm_epsilon": _EPSILON,
    "type_vocab_size": Range(0, 1024),
    "pad_token_id": Range(0, 2**22),
    "local_attention": Range(2, 2**24),
    "global_attn_every_n_layers": _LAYERS,
    "global_rope_theta": _THETA,
    "local_rope_theta": _THETA,
    "attention_multiplier": _FACTOR,
    "embedding_multiplier": _FACTOR,
    "logits_scaling": _FACTOR,
    "residual_multiplier": _FACTOR,
    "num_shared_experts": _EXPERTS,
    "scale_emb": _FACTOR,
    "rope_ratio": _FACTOR,
    "seq_length": _CONTEXT,
    "scale_depth": _FACTOR,
    "dim_model_base": _WIDTH,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.q_lora_rank": _WIDTH,
    "attention.kv_lora_rank": Range(2, 2**14),
    "attention.key_length_mla": _HEAD_WIDTH,
    "attention.value_length_mla": _HEAD_WIDTH,
    "attention.temperature_scale": Range(0.0, 1e6),
    "attention.scale": _FACTOR,
    "embedding_scale": _FACTOR,
    "residual_scale": _FACTOR,
    "logit_scale": _FACTOR,
    "temperature": _FACTOR,
    "rope.scaling.yarn_log_multiplier": _FACTOR,
    "query_pre_attn_scalar": _FACTOR,
    "attn_logit_softcapping": _FACTOR,
    "final_logit_softcapping": _FACTOR,
    "rope_theta": _THETA,
    "rope_local_base_freq": _THETA,
    "rope.freq_base": _THETA,
    "rope.freq_base_swa": _THETA,
    "partial_rotary_factor": Range(1e-3, 1.0),
    "rotary_pct": Range(1e-3, 1.0),
    "rotary_emb_base": _THETA,
    "partial_rotary_factors": Range(1e-3, 1.0),
    "factor": _FACTOR,
    "rope.scaling.factor": _FACTOR,
    "rope.scale_linear": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "short_factor": _FACTOR,
    "long_factor": _FACTOR,
    "attention_factor": _FACTOR,
    "attn_factor": _FACTOR,
    "rope.scaling.attn_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "rope.scaling.yarn_beta_fast": _FACTOR,
    "rope.scaling.yarn_beta_slow": _FACTOR,
    "mscale": _SHARE,
    "mscale_all_dim": _SHARE,
    "llama_4_scaling_beta": Range(0.0, 1e6),
    "nextn_predict_layers": Range(0, 1024),
    "num_experts": _EXPERTS,
    "model_max_length": Range(1, 2**24),
    "moe_every_n_layers": Range(0, 4096),
    "moe_top_k": _EXPERTS,
    "moe_topk": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "expert_count": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "moe_intermediate_size": _MIDDLE,
    "moe_latent_size": _WIDTH,
    "moe_num_experts": _EXPERTS,
    "moe_k": _EXPERTS,
    "moe_num_shared_experts": Range(0, 64),
    "moe_layer_start_index": Range(0, 1024),
    "moe_layer_interval": _LAYERS,
    "moe_norm_min": Range(0.0, 1e-3),
    "expert_feed_forward_length": _MIDDLE,
    "shared_expert_intermediate_size": _MIDDLE,
    "shared_intermediate_size": Range(0, 2**20),
    "moe_shared_expert_intermediate_size": _MIDDLE,
    "expert_shared_feed_forward_length": _MIDDLE,
    "n_shared_experts": Range(0, 64),
    "expert_shared_count": Range(0, 64),
    "swiglu_limit": _FACTOR,
    "swiglu_alpha": _FACTOR,
    "decoder_sparse_step": _LAYERS,
    "num_dense_layers": Range(0, 1024),
    "first_k_dense_replace": Range(0, 1024),
    "leading_dense_block_count": Range(0, 1024),
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "expert_group_count": _EXPERTS,
    "expert_group_used_count": _EXPERTS,
    "routed_scaling_factor": _FACTOR,
    "expert_weights_scale": _FACTOR,
}
# At any depth of `quantization_config`; whole numbers or lists of them.
QUANTIZATION_RANGES: dict[str, Range] = {
    "bits": Range(1, 16),
    "w_bit": Range(1, 16),
    "num_bits": Range(1, 16),
    "group_size": Range(-1, 2**17),  # -1 means all inputs
    "q_group_size": Range(-1, 2**17),
    "block_structure": Range(1, 2**17),
    "weight_block_size": Range(1, 2**17),
}
_MOST_EXPERTS = 2**17  # of all layers together; the largest models have 2**15
_MAX_NESTING = 16  # of `quantization_config`


def check_spec(spec: DecoderSpec, origin: str) -> None:
    """Raise ModelError if numbers contradict each other; `origin` names their file."""
    experts = [layer.mlp.router for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)]
    if sum(router.num_experts for router in experts) > _MOST_EXPERTS:
        raise UnsupportedModelError(
            f"{origin}: {len(experts)} layers of {experts[0].num_experts} experts are more than "
            f"the {_MOST_EXPERTS} experts that a model can have here; choose a smaller one"
        )
    if not spec.cache_layers and spec.own_cache is None:
        raise UnsupportedModelError(
            f"{origin}: none of {len(spec.layers)} layers has attention, by layer_types, "
            "layers_block_type or attn_layer_indices; supported are models with at least one such "
            "layer"
        )
    for latent in set(spec.latent_layers.values()):
        if latent.latent % 2:
            raise UnsupportedModelError(
                f"{origin}: kv_lora_rank is {latent.latent}, but must be even, as the cache holds a"
                " token in two halves; choose another model"
            )
    for attention in set(spec.attention_layers.values()) | set(spec.latent_layers.values()):
        rope = attention.rope
        width = attention.head_dim
        if isinstance(attention, LatentAttentionSpec):
            width = attention.rope_dim
        if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= width:
            raise UnsupportedModelError(
                f"{origin}: {rope.rotary_dim} elements of each head would rotate, by head_dim or "
                "hidden_size / num_attention_heads, qk_rope_head_dim and partial_rotary_factor; "
                f"RoPE pairs them, so they must be even and from 2 to {width}, a head's width"
            )
        if rope.scaling is RopeScaling.LLAMA3 and rope.low_freq_factor > rope.high_freq_factor:
            raise CheckpointError(
                f"{origin}: low_freq_factor is {rope.low_freq_factor:g} and high_freq_factor "
                f"{rope.high_freq_factor:g}, but must not be below it;"
                " take the config.json of its makers"
            )


def check_quantization(config: Any, origin: str) -> None:
    """Raise CheckpointError if a number is out of range; `origin` names its file."""
    is_mean = isinstance(config, dict) and config.get("quant_method") == "exl3"  # of all bits
    for key, value in _named(config, origin, 0):
        if key not in QUANTIZATION_RANGES or value is None or (is_mean and key == "bits"):
            continue
        usual = QUANTIZATION_RANGES[key]
        for item in value if isinstance(value, list) else [value]:
            if type(item) is not int or item not in usual:
                raise wrong(origin, key, value, f"a whole number {in_words(usual)}")


def _named(value: Any, origin: str, nesting: int) -> Iterator[tuple[str, Any]]:
    if nesting > _MAX_NESTING:
        raise CheckpointError(
            f"{origin}: quantization_config is nested more than {_MAX_NESTING} deep; fetch the "
            "model again"
        )
    if isinstance(value, dict):
        yield from value.items()
        for item in value.values():
            yield from _named(item, origin, nesting + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _named(item, origin, nesting + 1)


def in_words(usual: Range) -> str:
    """Format a range, such as "from 1 to 1024"."""
    return f"from {usual.least:g} to {usual.most:.7g}"


def wrong(
    origin: str,
    key: str,
    value: Any,
    expected: str,
    advice: str = "take the config.json of its makers",
) -> CheckpointError:
    """Build the error for a setting with a value that no model has."""
    return CheckpointError(f"{origin}: {key} is {short(value)}, but must be {expected}; {advice}")


def short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
