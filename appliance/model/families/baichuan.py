"""Baichuan 7B, 1 and 2: Llama with fused attention; the second divides the head's rows by length.

transformers has no class of it: defaults and arithmetic are those of the code that its maker
publishes beside the weights, which is never run. The 13B models have biases by distance (ALiBi)
instead of rotation, and are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames
from appliance.model.spec import HeadNorm

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_SECOND = 125_696  # words of Baichuan 2, by which other programs tell it from the first's 64,000
_LAYERS = 40  # of the 13B models, by which llama.cpp tells them


def _read(config: ConfigReader) -> DecoderSpec:
    context = "max_position_embeddings"
    if context not in config:
        raise config.refuse(context, "a number, which the 7B models have: others have ALiBi")
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        num_kv_heads=config.integer("num_attention_heads"),
    )
    decoder = read_decoder(config, "baichuan", [attention] * config.integer("num_hidden_layers"))
    is_second = config.flag("norm_head", decoder.vocab_size >= _SECOND)
    return replace(decoder, head_norm=HeadNorm.ROWS if is_second else None)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "baichuan", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.integer("block_count") == _LAYERS:
        raise meta.refuse("block_count", "that of the 7B models: these have ALiBi")
    # llama.cpp multiplies by the head as it is in the file.
    return {"hidden_act": "silu", "norm_head": False}


BAICHUAN = Family(
    name="baichuan",
    model_type="baichuan",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    read=_read,
    names=TensorNames(qkv=("self_attn.W_pack",)),
    gguf=GGUFMapping(
        "baichuan",
        _gguf,
        GGUF_NAMES,
        interleaved_rope=True,
        own_names=TensorNames(),
    ),
    defaults=ClassDefaults(
        values={
            "vocab_size": 125696,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        known=frozenset({"head_dim", "rope_scaling"}),
    ),
)
