"""Reads the settings of multi-head latent attention from a Hugging Face config."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from appliance.model.families.rope import read_rope, rope_kind, rope_section
from appliance.model.spec import LatentAttentionSpec, NormSpec

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import RopeSpec

_EPSILON = 1e-6  # of the latents' norms, independent of the other norms


def read_latent_attention(
    config: ConfigReader, rope: RopeSpec | None = None, *, interleaved: bool | None = None
) -> LatentAttentionSpec:
    """Read latent attention, by default with the rotation that all layers share.

    `interleaved` is for classes without such a setting.
    """
    rope_dim, plain_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    rank, heads = config.value("q_lora_rank"), config.integer("num_attention_heads")
    if interleaved is None:
        interleaved = config.flag("rope_interleave", True)
    return LatentAttentionSpec(
        num_heads=heads,
        query_rank=None if rank is None else config.integer("q_lora_rank"),
        latent=config.integer("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", config.integer("hidden_size") // heads),
        scale=(plain_dim + rope_dim) ** -0.5 * _stretched(config) ** 2,
        rope=rope or read_rope(config, rope_dim),
        norm=NormSpec(_EPSILON),
        bias=config.flag("attention_bias"),
        interleaved=interleaved,
    )


def _stretched(config: ConfigReader) -> float:
    """Read YaRN's factor of queries and keys, which their rotation does not include."""
    section = rope_section(config)
    share = section.optional_number("mscale_all_dim")
    if rope_kind(section) == "default" or not share:
        return 1.0
    factor = section.number("factor")
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
