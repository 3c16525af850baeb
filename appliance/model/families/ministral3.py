"""Ministral 3, the text part of Mistral 3: YaRN, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model.families.family import Family
from appliance.model.families.rope import scaled_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_window,
)

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config, default=128)
    section = config.section("rope_parameters")
    beta = section.number("llama_4_scaling_beta", 0.0)
    context = section.integer(
        "original_max_position_embeddings", config.integer("max_position_embeddings")
    )
    section.value("max_position_embeddings")  # the config's own, once more
    rope = scaled_rope(config, section, 1000000.0, head_dim)
    attention = read_attention(
        config,
        replace(rope, query_beta=beta, original_context=context),
        head_dim,
        window=read_window(config),
    )
    return read_decoder(config, "ministral3", [attention] * config.integer("num_hidden_layers"))


MINISTRAL3 = Family(
    name="ministral3",
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM",),
    read=_read,
)
