"""Models whose class only their makers publish, each derived from a class of transformers.

Such a model computes what its relative in transformers computes; the published code says under
which names it stores the same tensors and settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models.expert_models import EXPERTS
from torch import Tensor

Parts = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Maker:
    """How a maker's folder differs from its relative's.

    Attributes:
        relative: the class's `model_type` in transformers.
        settings: of that class.
        config: settings that the folder adds to the sizes, which have the same names in both.
        renamed: the maker's parts of names by the relative's.
        joined: turns the tensors of a layer that the maker stores together.
        unnamed: settings of the relative that the folder renames or leaves out.
        buffers: further tensors, which repeat what the arithmetic computes.
        head: how the maker's code transforms the stored head.
    """

    relative: str
    settings: dict[str, Any]
    config: dict[str, Any]
    renamed: dict[str, str] = field(default_factory=dict)
    joined: Callable[[dict[str, Tensor]], Parts] | None = None
    unnamed: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    head: Callable[[Tensor], Tensor] | None = None


def _by_key_head(state: dict[str, Tensor]) -> Parts:
    """InternLM 2: a key head's queries, its key and its value are neighbours."""
    for name in list(state):
        if name.endswith("self_attn.q_proj.weight"):
            parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            groups = [part.unflatten(0, (2, -1)) for part in parts]
            yield (
                name.replace("self_attn.q_proj", "attention.wqkv"),
                torch.cat(groups, dim=1).flatten(0, 1),
            )


def _fused(own: str) -> Callable[[dict[str, Tensor]], Parts]:
    """Query, key and value one after another, under one name."""

    def joined(state: dict[str, Tensor]) -> Parts:
        for name in [name for name in state if "self_attn.q_proj" in name]:
            layer, _, kind = name.partition("self_attn.q_proj.")
            number = layer.split(".")[2]
            parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            yield f"{own.format(number)}.{kind}", torch.cat(parts)

    return joined


_MINICPM = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 30,
}
# Granite's factors of the same model: 3 layers of width 60, whose heads are 10 wide.
_AS_MINICPM = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 10**-0.5,
    "tie_word_embeddings": False,
}
_OF_GRANITE = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

MAKERS: dict[str, Maker] = {
    "internlm2": Maker(
        "llama",
        {},
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
        {
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        _by_key_head,
    ),
    "qwen": Maker(
        "qwen2",
        {"num_key_value_heads": 6, "head_dim": 10, "rms_norm_eps": 1e-6},
        {
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "intermediate_size": 152,
            "kv_channels": 10,
            "seq_length": 64,
            "rotary_emb_base": 10000,
        },
        {
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        _fused("transformer.h.{}.attn.c_attn"),
        ("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters"),
    ),
    "chatglm": Maker(
        "glm",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "add_qkv_bias": True,
            "ffn_hidden_size": 76,
            "kv_channels": 16,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_layers": 3,
            "padded_vocab_size": 97,
            "rope_ratio": 0.05,
            "seq_length": 128,
        },
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            "model.layers": "transformer.encoder.layers",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        _fused("transformer.encoder.layers.{}.self_attention.query_key_value"),
        (
            "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim", "rms_norm_eps",
            "max_position_embeddings", "num_key_value_heads", "attention_bias", "hidden_act",
            "rope_parameters", "partial_rotary_factor",
        ),
        ("transformer.rotary_pos_emb.inv_freq",),
    ),
    "bailing-v2": Maker(
        "glm4_moe",
        EXPERTS["glm4_moe"][1] | {"attention_bias": False, "head_dim": 16},
        {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe",
            "num_experts": EXPERTS["glm4_moe"][1]["n_routed_experts"],
            "num_shared_experts": 2,
        },
        {
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        },
        _fused("model.layers.{}.attention.query_key_value"),
        ("n_routed_experts", "n_shared_experts", "use_qk_norm", "attention_bias"),
    ),
    "minicpm": Maker(
        "granite",
        _AS_MINICPM,
        _MINICPM,
        unnamed=(*_OF_GRANITE, "attention_multiplier"),
    ),
    # Like MiniCPM 1, whose config.json leaves out its class's defaults.
    "minicpm-tied": Maker(
        "granite",
        _AS_MINICPM | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        _MINICPM | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        unnamed=(
            *_OF_GRANITE, "attention_multiplier", "tie_word_embeddings", "rms_norm_eps",
            "hidden_act", "attention_bias", "rope_parameters", "mlp_bias",
        ),
    ),
}  # fmt: skip


MAKERS |= {
    "bailing": Maker(
        "mixtral",
        EXPERTS["mixtral"][1] | {"head_dim": 16, "rms_norm_eps": 1e-5},
        {
            "architectures": ["BailingMoeForCausalLM"],
            "model_type": "bailing_moe",
            "num_experts": EXPERTS["mixtral"][1]["num_local_experts"],
            "num_shared_experts": 0,
            "moe_intermediate_size": 76,
            "norm_head": True,
            "use_bias": False,
        },
        {
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.o_proj": "attention.dense",
            "block_sparse_moe": "mlp",
            ".w1.": ".gate_proj.",
            ".w2.": ".down_proj.",
            ".w3.": ".up_proj.",
        },
        _fused("model.layers.{}.attention.query_key_value"),
        ("num_local_experts", "rms_norm_eps"),
        head=lambda head: head / (torch.norm(head, p=2, dim=0, keepdim=True) + 1e-7),
    ),
    "mimo": Maker(
        "qwen2",
        {},
        {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
        },
        buffers=("model.mtp_layers.0.input_proj.weight",),
    ),
    # Only the size of the vocabulary tells Baichuan 2 from 1.
    "baichuan": Maker(
        "llama",
        {"num_key_value_heads": 6},
        {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
        joined=_fused("model.layers.{}.self_attn.W_pack"),
        unnamed=("num_key_value_heads", "hidden_act", "attention_bias", "mlp_bias"),
    ),
    "baichuan2": Maker(
        "llama",
        {"num_key_value_heads": 6, "vocab_size": 125_696},
        {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
        joined=_fused("model.layers.{}.self_attn.W_pack"),
        unnamed=("num_key_value_heads", "hidden_act", "attention_bias", "mlp_bias"),
        head=torch.nn.functional.normalize,
    ),
}


def save_as_maker(case: str, model: Any, folder: Path) -> Path:
    """Write a case's model in its maker's form, from that of its relative."""
    maker = MAKERS[case]
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    made = {} if maker.joined is None else dict(maker.joined(state))
    for name, tensor in state.items():
        for old, own in maker.renamed.items():
            name = name.replace(old, own)
        made[name] = tensor
    made |= {name: torch.ones(2) for name in maker.buffers}
    made = {name: tensor.contiguous().clone() for name, tensor in made.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in maker.unnamed}
    (folder / "config.json").write_text(json.dumps(config | maker.config))
    return folder
