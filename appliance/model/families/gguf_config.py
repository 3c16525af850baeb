"""Converts GGUF metadata to a Hugging Face config: settings that all families share.

Key names are those of the GGUF specification (docs/gguf.md of the ggml project).

The keys are all of llama.cpp's table (src/llama-arch.cpp), and those that only Ollama writes.
llama.cpp's own defaults (src/llama-hparams.h) are as good as no key: converters leave them out, and
its model saver writes all of them. A key that nobody reads is refused with its value, unless a
table here says why it may be there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from appliance.errors import CheckpointError
from appliance.model.families.limits import RANGES
from appliance.model.families.reader import ConfigReader
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS
from appliance.model.names import (
    ExpertNames,
    GatedDeltaNames,
    LatentNames,
    Mamba2Names,
    ShortConvNames,
    TensorNames,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

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
_SCALINGS = ("none", "linear", "yarn", "longrope")  # all that llama.cpp knows
GGUF_NAMES = TensorNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    mixer_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    output="attn_output",
    mixer_post_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    mlp_post_norm="post_ffw_norm",
    experts=ExpertNames(
        router="ffn_gate_inp",
        selection_bias="exp_probs_b.bias",
        gate_up=("ffn_gate_exps", "ffn_up_exps"),
        down="ffn_down_exps",
        shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
        shared_down="ffn_down_shexp",
        shared_gate="ffn_gate_inp_shexp",
        into_latent="ffn_latent_down",
        out_of_latent="ffn_latent_up",
        stacked_gate_up="ffn_gate_up_exps",
        router_norm="ffn_gate_inp.scale",
        expert_scale="ffn_down_exps.scale",
        input_norm="pre_ffw_norm_2",
        shared_norm="post_ffw_norm_1",
        output_norm="post_ffw_norm_2",
    ),
    latent=LatentNames(
        query="attn_q",
        query_down="attn_q_a",
        query_norm="attn_q_a_norm",
        query_up="attn_q_b",
        token="attn_kv_a_mqa",
        norm="attn_kv_a_norm",
        heads="attn_kv_b",
        keys="attn_k_b",
        values="attn_v_b",
    ),
    mamba2=Mamba2Names(
        input="ssm_in",
        filter="ssm_conv1d",
        step_bias="ssm_dt.bias",
        log_rates="ssm_a",
        skip="ssm_d",
        norm="ssm_norm",
        output="ssm_out",
    ),
    short_conv=ShortConvNames(
        input="shortconv.in_proj", filter="shortconv.conv", output="shortconv.out_proj"
    ),
    gated_delta=GatedDeltaNames(
        qkv="attn_qkv",
        gate="attn_gate",
        share="ssm_beta",
        decay="ssm_alpha",
        filter="ssm_conv1d",
        log_rates="ssm_a",
        decay_bias="ssm_dt.bias",
        norm="ssm_norm",
        output="ssm_out",
    ),
)


def gguf_config(
    file: GGUFFile, architecture: str, extra: Callable[[ConfigReader, GGUFFile], dict[str, Any]]
) -> dict[str, Any]:
    """Build a Hugging Face config without `architectures` and `model_type`.

    Args:
        architecture: value of `general.architecture`, the prefix of the settings.
        extra: reads the family's own settings; its result overrides the shared ones.

    Raises:
        CheckpointError: a setting is missing or of the wrong type.
        UnsupportedModelError: an unread setting changes the arithmetic.
    """
    meta = GGUFSettings(file, architecture)
    config = _shared(meta, file) | extra(meta, file)
    meta.refuse_rest()
    return config


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


def _shared(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    names = file.tensor_names()
    if "token_embd.weight" not in names:
        raise CheckpointError(
            f"{file.path} has no token_embd.weight; use another file of the model"
        )
    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    is_latent = meta.value("attention.kv_lora_rank") is not None
    if not is_latent and meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.refuse("attention.value_length", f"{head_dim}, as the keys have")
    rotary_dim = meta.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim:
        raise meta.refuse("rope.dimension_count", f"at most {head_dim}, as a head has")
    vocab_size = file.shape("token_embd.weight")[0]
    config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": max(of_layers(meta, "feed_forward_length")),
        "num_hidden_layers": num_layers(meta),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, *kv_heads(meta, num_heads)),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(meta),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_factors(meta, file) or gguf_rope_scaling(meta),
        "rope_parameters": {"rope_type": "default", **_sections(meta)},  # without scaling
        "partial_rotary_factor": rotary_dim / head_dim,
        "tie_word_embeddings": "output.weight" not in names,
    }
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = file.metadata.get(f"tokenizer.ggml.{source}_token_id")
        if type(token_id) is int and 0 <= token_id < vocab_size:  # 2^32 - 1 is none
            config[key] = token_id
    return config


def _sections(meta: ConfigReader) -> dict[str, Any]:
    """Read the shares of time, height and width in the frequencies, which pictures need."""
    sections = meta.value("rope.dimension_sections")
    return {"mrope_section": sections[:3]} if isinstance(sections, list) else {}


def num_layers(meta: ConfigReader) -> int:
    """Return the number of layers: blocks that predict further tokens are none."""
    blocks, further = meta.integer("block_count"), meta.integer("nextn_predict_layers", 0)
    if further >= blocks:
        raise meta.refuse("nextn_predict_layers", f"fewer than the {blocks} of block_count")
    return blocks - further


def _epsilon(meta: ConfigReader) -> float:
    rms = "attention.layer_norm_rms_epsilon"
    return meta.number(rms if rms in meta else "attention.layer_norm_epsilon")


def gguf_biases(file: GGUFFile, *, attention: str = "", mlp: str = "") -> dict[str, bool]:
    """Set the settings that give linears of attention and MLP their biases.

    Absent ones are zeros; see `gguf_tensors`.
    """
    parts = {
        attention: ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
        mlp: ("ffn_gate", "ffn_up", "ffn_down"),
    }
    biased = {name.split(".")[-2] for name in file.tensor_names() if name.endswith(".bias")}
    return {key: not biased.isdisjoint(names) for key, names in parts.items() if key}


def kv_heads(meta: ConfigReader, usual: int) -> tuple[int, ...]:
    """Read the number of KV heads, or a list per layer: 0 without attention."""
    return of_layers(meta, "attention.head_count_kv", usual)


def of_layers(meta: ConfigReader, key: str, usual: int | None = None) -> tuple[int, ...]:
    """Read a number for all layers, or a list per layer, in which 0 is allowed."""
    if not isinstance(meta.value(key), list):
        return (meta.integer(key, usual),)
    layers = num_layers(meta)
    listed = meta.value(key)
    # Some writers list the blocks that predict further tokens too.
    count = len(listed) if len(listed) == meta.integer("block_count") else layers
    return meta.integers(key, count)[:layers]


def gguf_layer_types(meta: ConfigReader, period: int) -> list[str]:
    """Read each layer's kind; without a list, every `period`th layer sees everything."""
    key, layers = "attention.sliding_window_pattern", num_layers(meta)
    listed = meta.value(key, period)
    if isinstance(listed, list):
        if len(listed) < layers:
            raise meta.refuse(key, f"a list of {layers} layers")
        slides = [bool(item) for item in listed[:layers]]
    else:
        every = meta.integer(key, period)
        slides = [(index + 1) % every != 0 for index in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def gguf_experts(meta: ConfigReader, count: str) -> dict[str, Any]:
    """Read the number of experts, as setting `count`, the number chosen and their width."""
    config = {
        count: meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
    }
    if meta.value("expert_feed_forward_length") is not None:
        config["moe_intermediate_size"] = meta.integer("expert_feed_forward_length")
    return config


def gguf_latent(meta: ConfigReader, value_width: int | None = None) -> dict[str, Any]:
    """Read the settings of latent attention in newer and older files.

    `value_width` is that of a head's values if the file does not say it.
    """
    rank = "attention.q_lora_rank"
    turning = meta.integer("rope.dimension_count")
    width = meta.integer("attention.key_length_mla", meta.integer("attention.key_length"))
    values = meta.integer(
        "attention.value_length_mla",
        value_width or meta.integer("attention.value_length"),
    )
    return {
        "q_lora_rank": None if meta.value(rank) is None else meta.integer(rank),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        "v_head_dim": values,
        "head_dim": turning,
        "partial_rotary_factor": None,
    }


def gguf_mamba2(meta: ConfigReader, file: GGUFFile, layer: int) -> dict[str, int | bool]:
    """Read the settings of Mamba-2 layers, such as `layer`, under this function's own names."""
    names, heads = file.tensor_names(), meta.integer("ssm.time_step_rank")
    return {
        "heads": heads,
        "head_dim": meta.integer("ssm.inner_size") // heads,
        "groups": meta.integer("ssm.group_count"),
        "state": meta.integer("ssm.state_size"),
        "taps": meta.integer("ssm.conv_kernel"),
        "filter_bias": f"blk.{layer}.ssm_conv1d.bias" in names,
        "bias": f"blk.{layer}.ssm_in.bias" in names,
    }


def gguf_growing_rope(meta: ConfigReader) -> dict[str, Any]:
    """Read the rotary settings of models whose queries grow with their position."""
    found = gguf_rope_scaling(meta) or {"rope_type": "default"}
    found["rope_theta"] = meta.number("rope.freq_base", 10000.0)
    if meta.value("attention.temperature_scale") is not None:
        found["llama_4_scaling_beta"] = meta.number("attention.temperature_scale")
    return found


def gguf_rope_scaling(meta: ConfigReader) -> dict[str, Any] | None:
    """Read the scaling of frequencies as a Hugging Face config describes it."""
    kind = meta.text("rope.scaling.type", "linear")  # llama.cpp's default, without effect at 1
    if kind not in _SCALINGS:
        raise meta.refuse("rope.scaling.type", ", ".join(_SCALINGS))
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    if kind in ("none", "longrope") or (factor == 1.0 and kind in ("linear", "yarn")):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer(
            "rope.scaling.original_context_length", meta.integer("context_length")
        )
        scaling["beta_fast"] = meta.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = meta.number("rope.scaling.yarn_beta_slow", 1.0)
        log_factor = meta.optional_number("rope.scaling.yarn_log_multiplier")
        if log_factor is not None:  # scales scores, not cosines
            scaling["mscale"] = scaling["mscale_all_dim"] = log_factor
        attention_factor = meta.number("rope.scaling.attn_factor", 1.0)
        if attention_factor != 1.0:
            usual = 1.0 if log_factor is not None else 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = attention_factor * usual
    return scaling


def _rope_factors(meta: ConfigReader, file: GGUFFile) -> dict[str, Any] | None:
    """Read tensors that divide frequencies: LongRoPE's two, or the one of Llama 3.1's scaling."""
    names = file.tensor_names()
    context = meta.integer("context_length")
    short, long = SHORT_FACTORS, LONG_FACTORS
    if long in names:
        context = meta.integer("rope.scaling.original_context_length", context)
        meta.value("rope.scaling.factor")  # the factors have it in them
    elif FREQUENCY_DIVISORS in names:
        if gguf_rope_scaling(meta) is not None:
            raise meta.refuse("rope.scaling.type", f"none beside {FREQUENCY_DIVISORS}")
        short = long = FREQUENCY_DIVISORS
    else:
        return None
    meta.value("rope.scaling.type")
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, short),
        "long_factor": _factors(file, long),
        "original_max_position_embeddings": context,
        "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
    }


def _factors(file: GGUFFile, name: str) -> list[float]:
    shape = file.shape(name) if name in file.tensor_names() else None
    if shape is None or len(shape) != 1 or shape[0] > RANGES["head_dim"].most:
        got = "is missing" if shape is None else f"has shape {shape}"
        raise CheckpointError(
            f"{file.path}: tensor {name} {got}, but must have a factor for each pair of elements "
            "of a head; use another file of the model"
        )
    return cast("Tensor", file.load(name)).tolist()
