"""Nemotron-H and Nemotron 3: each layer is a mixer or an MLP, without gates; no positions.

transformers 5 keeps a state's steps above `time_step_min` in prompts, but not in answers. Here they
are unbounded, as `time_step_limit` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
    gguf_mamba2,
    kv_heads,
    num_layers,
    of_layers,
)
from appliance.model.families.limits import RANGES
from appliance.model.families.mixers import ATTENTION_NAMES, RECURRENT_NAMES, read_mamba2
from appliance.model.families.rope import without_positions
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
)
from appliance.model.names import DraftHeadNames, ExpertNames, Mamba2Names, TensorNames
from appliance.model.spec import MLPSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.recurrent_spec import Mamba2Spec
    from appliance.model.spec import DecoderSpec, ExpertsSpec

_EPSILON = 1e-20  # of its router, in transformers
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # letters of the older pattern
_KINDS = (
    dict.fromkeys(RECURRENT_NAMES, "mamba")
    | dict.fromkeys(ATTENTION_NAMES, "attention")
    | {"mlp": "mlp", "moe": "moe"}
)


def _read(config: ConfigReader) -> DecoderSpec:
    kinds, head_dim = _read_kinds(config), read_head_dim(config)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, without_positions(head_dim), head_dim, qkv_bias=bias, output_bias=bias
    )
    mixers = {"attention": attention, "mamba": _read_mamba2(config) if "mamba" in kinds else None}
    mlps: dict[str, MLPSpec | ExpertsSpec | None] = {
        "mlp": _read_mlp(config, "intermediate_size") if "mlp" in kinds else None,
        "moe": _read_experts(config) if "moe" in kinds else None,
    }
    config.value("n_routed_experts")  # also set in models without experts
    return read_decoder(
        config,
        "nemotron_h",
        [mixers.get(kind) for kind in kinds],
        mlps=[mlps.get(kind) for kind in kinds],
        norm_eps="layer_norm_epsilon",
    )


def _read_kinds(config: ConfigReader) -> list[str]:
    """Read each layer's kind from a list or else from a pattern of letters; both count layers."""
    config.integer("num_hidden_layers", 1)  # without effect
    key = "layers_block_type"
    if config.is_given(key) or "hybrid_override_pattern" not in config:
        listed = config.value(key)
        count = _checked_count(config, key, len(listed) if isinstance(listed, list) else 0)
        return read_layer_kinds(config, _KINDS, count, key) or []
    letters = config.text("hybrid_override_pattern")
    _checked_count(config, "hybrid_override_pattern", len(letters))
    if not set(letters) <= _LETTERS.keys():
        raise config.refuse("hybrid_override_pattern", f"only {' '.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in letters]


def _checked_count(config: ConfigReader, key: str, count: int) -> int:
    if count not in RANGES["num_hidden_layers"]:
        raise CheckpointError(
            f"{config.origin}: {config.written(key)} names {count} layers, but must name from 1 to "
            f"{RANGES['num_hidden_layers'].most}; take the config.json of its makers"
        )
    return count


def _read_mamba2(config: ConfigReader) -> Mamba2Spec:
    if config.text("mamba_ssm_cache_dtype") != "float32":
        raise config.refuse("mamba_ssm_cache_dtype", "float32")
    return read_mamba2(
        config,
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups="n_groups",
        state="ssm_state_size",
        taps="conv_kernel",
        bias="use_bias",
        filter_bias="use_conv_bias",
        activation="mamba_hidden_act",
        eps="layer_norm_epsilon",
        expand=None,
    )


def _read_mlp(config: ConfigReader, width: str) -> MLPSpec:
    activation = read_activation(config, "mlp_hidden_act")
    bias = config.flag("mlp_bias")
    return MLPSpec(config.integer(width), activation, bias, gated=False)


def _read_experts(config: ConfigReader) -> ExpertsSpec:
    if config.flag("mlp_bias"):
        raise config.refuse("mlp_bias", "false in layers with experts")
    if config.integer("n_shared_experts") != 1:
        raise config.refuse("n_shared_experts", "1")
    latent = "moe_latent_size"
    return read_experts(
        config,
        count="n_routed_experts",
        activation_key="mlp_hidden_act",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=True,
        grouped=True,
        epsilon=_EPSILON,
        shared_width=config.integer("moe_shared_expert_intermediate_size"),
        gated=False,
        latent=None if config.value(latent) is None else config.integer(latent),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "nemotron_h", _gguf_extra)


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return (
            _gguf_extra(meta, file)
            | gguf_experts(meta, "n_routed_experts")
            | {
                "n_shared_experts": meta.integer("expert_shared_count"),
                "n_group": meta.integer("expert_group_count", 1),
                "topk_group": meta.integer("expert_group_used_count", 1),
                "moe_latent_size": meta.value("moe_latent_size"),
                "norm_topk_prob": meta.flag("expert_weights_norm"),
                "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
                "moe_shared_expert_intermediate_size": meta.integer(
                    "expert_shared_feed_forward_length"
                ),
            }
        )

    return gguf_config(file, "nemotron_h_moe", extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    heads = kv_heads(meta, meta.integer("attention.head_count"))
    widths, layers = of_layers(meta, "feed_forward_length"), num_layers(meta)
    if not len(heads) == len(widths) == layers:
        raise meta.refuse("feed_forward_length", f"a list of {layers} layers' with this family")
    names = file.tensor_names()
    kinds = [
        "attention" if count else "mamba" if not width else _mlp_kind(names, index)
        for index, (count, width) in enumerate(zip(heads, widths, strict=True))
    ]
    config: dict[str, Any] = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": meta.number("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2",
        **gguf_biases(file, attention="attention_bias", mlp="mlp_bias"),
    }
    if "mamba" not in kinds:
        return config
    mamba2 = gguf_mamba2(meta, file, kinds.index("mamba"))
    return config | {
        "mamba_num_heads": mamba2["heads"],
        "mamba_head_dim": mamba2["head_dim"],
        "n_groups": mamba2["groups"],
        "ssm_state_size": mamba2["state"],
        "conv_kernel": mamba2["taps"],
        "use_conv_bias": mamba2["filter_bias"],
        "use_bias": mamba2["bias"],
    }


def _mlp_kind(names: Collection[str], index: int) -> str:
    return "moe" if f"blk.{index}.ffn_gate_inp.weight" in names else "mlp"


_GGUF_NAMES = replace(GGUF_NAMES, mixer_norm="attn_norm", mlp_norm="attn_norm", gate_up=("ffn_up",))
_GGUF_NAMES = replace(
    _GGUF_NAMES,
    experts=replace(GGUF_NAMES.experts, gate_up=("ffn_up_exps",), shared_gate_up=("ffn_up_shexp",)),
)

NEMOTRON_H = Family(
    name="nemotron_h",
    model_type="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    read=_read,
    names=TensorNames(
        embedding="model.embeddings",
        final_norm="model.norm_f",
        mixer_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        experts=ExpertNames(
            router="mixer.gate",
            selection_bias="mixer.gate.e_score_correction_bias",
            gate_up=("mixer.experts.{}.up_proj",),
            down="mixer.experts.{}.down_proj",
            shared_gate_up=("mixer.shared_experts.up_proj",),
            shared_down="mixer.shared_experts.down_proj",
            into_latent="mixer.fc1_latent_proj",
            out_of_latent="mixer.fc2_latent_proj",
            stacked_gate_up="mixer.experts.up_proj",
            stacked_down="mixer.experts.down_proj",
        ),
        mamba2=Mamba2Names(
            input="mixer.in_proj",
            filter="mixer.conv1d",
            step_bias="mixer.dt_bias",
            log_rates="mixer.A_log",
            skip="mixer.D",
            norm="mixer.norm",
            output="mixer.out_proj",
        ),
    ),
    gguf=GGUFMapping("nemotron_h", _gguf, _GGUF_NAMES),
    draft_head=DraftHeadNames(
        layer="mtp.layers.{}.",
        kinds=("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        final_norm="{last}final_layernorm",
        chains_normed=True,
    ),
)
# GGUF files with experts have an architecture of their own.
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    gguf=GGUFMapping("nemotron_h_moe", _gguf_moe, _GGUF_NAMES),
)
