"""The settings of a GGUF file: which of llama.cpp's keys count, and at which values.

The keys are all of llama.cpp's table (src/llama-arch.cpp), and those that only Ollama writes.
llama.cpp's own defaults (src/llama-hparams.h) are as good as no key: converters leave them out, and
its model saver writes all of them. A key that nobody reads is refused with its value, unless a
table here says why it may be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.reader import ConfigReader

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile

# Keys that say nothing at 0, or in a list of zeros.
_UNSET_AT_0 = frozenset(
    {
        "activation.situ_beta", "activation.situ_linear_beta", "adapters.count",
        "attention.clamp_kqv", "attention.compress_ratios", "attention.compress_rope_freq_base",
        "attention.decay_lora_rank", "attention.gate_lora_rank", "attention.iclr_lora_rank",
        "attention.indexer.block_size", "attention.indexer.head_count",
        "attention.indexer.key_length", "attention.indexer.local_blocks",
        "attention.indexer.top_k", "attention.indexer.types", "attention.key_length_mla",
        "attention.key_length_mla_swa", "attention.key_length_swa", "attention.kv_lora_rank",
        "attention.kv_lora_rank_swa", "attention.max_alibi_bias", "attention.output_group_count",
        "attention.output_lora_rank", "attention.output_scale", "attention.q_lora_rank",
        "attention.relative_buckets_count", "attention.scale", "attention.sliding_window",
        "attention.temperature_length", "attention.temperature_scale",
        "attention.value_length_mla", "attention.value_length_mla_swa",
        "attention.value_length_swa", "attention.value_residual_mix_lora_rank",
        "attention.value_scale", "attn_logit_softcapping", "attn_res.block_size",
        "convnext.block_count", "convnext.embedding_length", "embedding_length_out",
        "embedding_scale", "expert_chunk_feed_forward_length", "expert_feed_forward_length",
        "expert_gating_func", "expert_group_count", "expert_group_used_count",
        "expert_latent_length", "expert_shared_feed_forward_length", "expert_weights_scale",
        "experts_per_group", "final_logit_softcapping", "full_attention_interval",
        "hash_layer_count", "hyper_connection.count", "hyper_connection.epsilon",
        "hyper_connection.sinkhorn_iterations", "interleave_moe_layer_step", "kda.head_dim",
        "kda.safe_gate", "logit_scale", "moe_every_n_layers", "moe_latent_size",
        "nextn_predict_layers", "num_loops", "posnet.block_count", "posnet.embedding_length",
        "rescale_every_n_layers", "residual_scale", "rope.dimension_count_swa",
        "rope.scale_linear", "rope.scaling.alpha", "rope.scaling.factor",
        "rope.scaling.yarn_log_multiplier", "router_logit_softcapping", "shortconv.l_cache",
        "skip_loop_final_norm", "ssm.conv_kernel", "ssm.dt_b_c_rms", "ssm.group_count",
        "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "swiglu_clamp_exp",
        "swiglu_clamp_shexp", "swin_norm", "time_decay_extra_dim", "time_mix_extra_dim",
        "use_parallel_residual", "wkv.head_size",
    }
)  # fmt: skip
# Keys without effect on generated text where no family reads them.
_WITHOUT_EFFECT = frozenset(
    {
        "attention.group_norm_epsilon", "attention.group_norm_groups",
        "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
        "attention.recurrent_layers", "classifier.output_labels", "decoder_block_count",
        "decoder_start_token_id", "deepstack_mapping", "dense_2_feat_in", "dense_2_feat_out",
        "dense_3_feat_in", "dense_3_feat_out", "embedding_length_out", "expert_group_scale",
        "features_length", "kda.gate_lower_bound", "n_deepstack_layers", "pooling_type",
        "rope.dimension_sections", "rope.scaling.finetuned",
        "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "tensor_data_layout", "token_shift_count", "vocab_size",
        # The tensors say as much: one too many or too few is refused.
        "expert_feed_forward_length", "expert_shared_count", "expert_shared_feed_forward_length",
        "expert_used_count", "expert_weights_norm", "leading_dense_block_count",
    }
)  # fmt: skip
# How settings of vision and audio begin in Ollama's files, and of their tokens' places in a text.
_OF_OTHER_PARTS = (
    "vision.", "audio.", "sam.", "mm.", "image_token_", "vision_start_token_", "vision_end_token_",
    "spatial_merge_size", "rope.mrope_interleaved",
)  # fmt: skip
# Values at which a key that nobody reads changes nothing. Caps are llama.cpp's defaults for the
# few architectures that have one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.rope_pattern": (1,),
    "attn_logit_softcapping": (50,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (1,),
    "expert_group_used_count": (1,),
    "expert_weights_scale": (1,),
    "final_logit_softcapping": (30,),
    "full_attention_interval": (1,),
    "interleave_moe_layer_step": (1,),
    "logit_scale": (1,),
    "moe_every_n_layers": (1,),
    "norm_top_k_prob": (True,),
    "num_loops": (1,),
    "residual_scale": (1,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "router_logit_softcapping": (30,),
    "ssm.v_head_reordered": (True,),
}
# Keys of layers with a window, and the key of all layers that they repeat if there are none.
_OF_WINDOWS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}


class GGUFSettings(ConfigReader):
    """Settings of an architecture, without its prefix and without llama.cpp's defaults.

    Writers differ in the types of numbers: a flag may be 0 or 1, and a number of all layers a list.
    """

    if_wrong = if_missing = "use another file of the model"

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        prefix = f"{architecture}."
        stored = file.metadata.items()
        found = {key.removeprefix(prefix): v for key, v in stored if key.startswith(prefix)}
        values = {
            key: value
            for key, value in found.items()
            if not _is_unset(key, value) and not key.startswith(_OF_OTHER_PARTS)
        }
        super().__init__(values, f"{file.path}: {architecture}")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        return bool(value) if type(value) is int and value in (0, 1) else super().flag(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a number, also from a list per layer whose numbers are 0 or the same."""
        value = self.value(key)
        if not isinstance(value, list):
            return super().integer(key, default)
        numbers = set(self.integers(key, len(value))) - {0}
        if len(numbers) != 1:
            raise self.refuse(key, "the same number in all layers")
        return numbers.pop()

    def refuse_rest(self) -> None:
        """Refuse a key that nobody read and that is not known to change nothing."""
        values = self._values
        has_windows = "attention.sliding_window" in values
        same = {
            key: (values[of_all],)
            for key, of_all in _OF_WINDOWS.items()
            if has_windows and of_all in values
        }
        unused = frozenset() if has_windows else frozenset(_OF_WINDOWS)
        kind = values.get("rope.scaling.type")
        extrapolated = {"rope.scaling.yarn_ext_factor": (-1, 1 if kind == "yarn" else 0)}
        neutral = _NEUTRAL | same | extrapolated
        self.refuse_unread(neutral)
        self.refuse_unknown(_WITHOUT_EFFECT | unused | neutral.keys())


def _is_unset(key: str, value: Any) -> bool:
    if isinstance(value, list) and not value:
        return True
    items = value if isinstance(value, list) else [value]
    return key in _UNSET_AT_0 and all(item in (0, None) for item in items)
