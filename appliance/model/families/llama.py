"""Llama 1 to 3, SmolLM 1 and 2, and the many models that share their architecture.

EXAONE 3 is Llama under other names; Arcee (AFM) is Llama without gates in its MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import AttentionSpec, DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    return read_decoder(config, "llama", _mixers(config), mlp_bias=config.flag("mlp_bias"))


def _read_ungated(config: ConfigReader) -> DecoderSpec:
    mixers, activation = _mixers(config), read_activation(config, gated=False)
    bias = config.flag("mlp_bias")
    mlp = MLPSpec(config.integer("intermediate_size"), activation, bias, gated=False)
    return read_decoder(config, "arcee", mixers, mlps=[mlp] * len(mixers))


def _mixers(config: ConfigReader) -> list[AttentionSpec]:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, qkv_bias=bias, output_bias=bias
    )
    return [attention] * config.integer("num_hidden_layers")


def _is_exaone(config: Mapping[str, Any]) -> bool:
    """Tell EXAONE 3, which transformers saves under the name of Llama's class."""
    return config.get("model_type") == "exaone"


def _is_llama(config: Mapping[str, Any]) -> bool:
    return not _is_exaone(config)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "llama", _gguf_extra)


def _gguf_exaone(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "exaone", _gguf_extra)


def _gguf_paddleocr(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "paddleocr", _gguf_extra)


def _gguf_ungated(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "arcee", _gguf_extra) | {"hidden_act": "relu2"}


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    biases = gguf_biases(file, attention="attention_bias", mlp="mlp_bias")
    return {"hidden_act": "silu"} | biases


LLAMA = Family(
    name="llama",
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    read=_read,
    covers=_is_llama,
    gguf=GGUFMapping("llama", _gguf, GGUF_NAMES, interleaved_rope=True, two_way=("llama-embed",)),
)
EXAONE = Family(
    name="exaone",
    model_type="exaone",
    architectures=("ExaoneForCausalLM", "LlamaForCausalLM"),
    read=_read,
    covers=_is_exaone,
    names=TensorNames(
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        mixer_norm="ln_1",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        output="attn.attention.out_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
    ),
    # EuroBERT is Llama, but its files have Llama's rows in the order of checkpoints.
    gguf=GGUFMapping("exaone", _gguf_exaone, GGUF_NAMES, two_way=("eurobert",)),
)
# The text part of PaddleOCR-VL; its files have rows in the order of checkpoints.
PADDLEOCR_VL = replace(
    LLAMA,
    name="paddleocr_vl",
    gguf=GGUFMapping("paddleocr", _gguf_paddleocr, GGUF_NAMES),
)
ARCEE = Family(
    name="arcee",
    model_type="arcee",
    architectures=("ArceeForCausalLM",),
    read=_read_ungated,
    names=TensorNames(gate_up=("mlp.up_proj",)),
    gguf=GGUFMapping(
        "arcee", _gguf_ungated, replace(GGUF_NAMES, gate_up=("ffn_up",)), interleaved_rope=True
    ),
)
