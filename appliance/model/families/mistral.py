"""Mistral: Llama with a sliding window in all layers of its first version.

Its GGUF files are labelled llama and lack the window, so none is written for that version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.families.family import Family
from appliance.model.families.llama import LLAMA
from appliance.model.families.rope import read_rope
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
    head_dim = read_head_dim(config)
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, window=read_window(config)
    )
    return read_decoder(config, "mistral", [attention] * config.integer("num_hidden_layers"))


MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    read=_read,
    labelled=LLAMA.gguf,
)
