"""Reads rotary settings of Hugging Face configs, old and new style, into a `RopeSpec`.

Old: `rope_theta` and `rope_scaling` beside the other settings. New: all of it in `rope_parameters`,
optionally per layer type. Formulas of the attention factors: YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753). Knows no family.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model.families.reader import ClassDefaults
from appliance.model.spec import RopeScaling, RopeSpec

if TYPE_CHECKING:
    from typing import Any

    from appliance.model.families.reader import ConfigReader

_SCALINGS = {
    "default": RopeScaling.NONE,
    "dynamic": RopeScaling.NONE,  # grows behind `max_position_embeddings`, where no sequence comes
    "mrope": RopeScaling.NONE,  # for images: text has one position
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "longrope": RopeScaling.LONGROPE,
    "su": RopeScaling.LONGROPE,  # its name before publication
    "yarn": RopeScaling.YARN,
    "proportional": RopeScaling.PROPORTIONAL,
}
# Each scaling reads some of these and ignores the others.
_KNOWN_KEYS = frozenset(
    {
        "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor",
        "long_factor", "low_freq_factor", "mscale", "mscale_all_dim", "short_factor", "truncate",
        "mrope_interleaved", "mrope_section",  # for images: text has one position
        "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type",
        "type",
    }
)  # fmt: skip


# No class replaces these where they are null, and none can compute with them.
_OF_SECTION = ClassDefaults(
    never_null=frozenset(
        {
            "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor",
            "rope_theta", "rope_type",
        }
    )
)  # fmt: skip


def read_rope(config: ConfigReader, head_dim: int, *, partial: bool = False) -> RopeSpec:
    """Read the rotary settings that all layers share; `partial` allows part of a head to rotate."""
    section, key = rope_section(config), "partial_rotary_factor"
    is_outside = config.is_given(key) or key not in section
    share = config.number(key, 1.0) if is_outside else 1.0  # the section's counts where both are
    return scaled_rope(config, section, "rope_theta", head_dim, partial, share)


def rope_section(config: ConfigReader) -> ConfigReader:
    """Return the section of rotary settings, of the old style if both are there."""
    old = config.section("rope_scaling", _OF_SECTION)
    new = config.section("rope_parameters", _OF_SECTION)
    return old if config.value("rope_scaling") else new


def rope_kind(section: ConfigReader) -> str:
    """Read the name of a scaling, by its new or its old key."""
    return section.text(_kind_key(section), "default")


def _kind_key(section: ConfigReader) -> str:
    return "rope_type" if "rope_type" in section else "type"


def section_of_layers(sections: ConfigReader, kind: str) -> ConfigReader:
    """Return the section of one kind of layers."""
    return sections.section(kind, _OF_SECTION)


def read_growing_rope(config: ConfigReader, turning: int, head_dim: int) -> RopeSpec:
    """Read the rotary settings of Mistral's models, whose queries grow with their position.

    `turning` of a head's `head_dim` elements rotate.
    """
    section = rope_section(config)
    beta = section.number("llama_4_scaling_beta", 0.0)
    context = section.integer(
        "original_max_position_embeddings", config.integer("max_position_embeddings")
    )
    section.value("max_position_embeddings")  # repeats the config's own
    if round(head_dim * section.number("partial_rotary_factor", turning / head_dim)) != turning:
        raise section.refuse("partial_rotary_factor", f"{turning} of {head_dim} elements")
    inside = section.without("partial_rotary_factor")
    rope = scaled_rope(config, inside, "rope_theta", turning)
    return replace(rope, query_beta=beta, original_context=context)


def without_positions(head_dim: int) -> RopeSpec:
    """Return the settings of heads that do not rotate."""
    return RopeSpec(theta=10000.0, rotary_dim=head_dim, scaling=RopeScaling.PROPORTIONAL)


def scaled_rope(
    config: ConfigReader,
    section: ConfigReader,
    theta: str | float | None,
    head_dim: int,
    partial: bool = False,
    share: float = 1.0,
) -> RopeSpec:
    """Read one set of rotary settings.

    Args:
        section: the settings, possibly empty.
        theta: if the section has none, the config's setting of that name, or a number; None: the
            section must have one.
        partial: the family may rotate only part of a head.
        share: that part, if the section has none.
    """
    kind = rope_kind(section)
    if kind not in _SCALINGS:
        raise section.refuse(_kind_key(section), ", ".join(_SCALINGS))
    if kind == "dynamic":
        section.number("factor")  # which its class wants, though it has no effect
    # Qwen3-Omni says twice how images' positions lie; alone it is another model's order of pairs.
    is_of_images = section.is_given("mrope_interleaved") and section.is_given("mrope_section")
    more = {"interleaved"} if is_of_images else set()
    section.refuse_unknown(_KNOWN_KEYS | more | ({"attn_factor"} if kind == "yarn" else set()))
    share = section.number("partial_rotary_factor", share)
    if share != 1.0 and not partial and kind != "proportional":
        owner = section if "partial_rotary_factor" in section else config
        raise owner.refuse("partial_rotary_factor", "1.0 with this architecture")
    scaling = _SCALINGS[kind]
    is_proportional = scaling is RopeScaling.PROPORTIONAL
    rotary_dim = head_dim if is_proportional else int(head_dim * share)
    if isinstance(theta, str):
        theta = None if "rope_theta" in section else config.number(theta)
    return RopeSpec(
        theta=section.number("rope_theta", theta),
        rotary_dim=rotary_dim,
        scaling=scaling,
        turning=int(share * head_dim // 2) if is_proportional else 0,
        **_READERS[scaling](config, section, rotary_dim),
    )


def _none(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    return {}


def _proportional(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    return {"factor": section.number("factor", 1.0)}


def _linear(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    return {"factor": section.number("factor")}


def _llama3(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    return {
        "factor": section.number("factor"),
        "low_freq_factor": section.number("low_freq_factor"),
        "high_freq_factor": section.number("high_freq_factor"),
        "original_context": _original_context(config, section),
    }


def _longrope(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    original = _original_context(config, section)
    factor = section.number("factor", config.integer("max_position_embeddings") / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "original_context": original,
        "short_factors": section.numbers("short_factor", rotary_dim // 2),
        "long_factors": section.numbers("long_factor", rotary_dim // 2),
        "attention_factor": section.number("attention_factor", usual),
    }


def _yarn(config: ConfigReader, section: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    original = _original_context(config, section)
    usual = config.integer("max_position_embeddings") / original if "factor" in section else None
    factor = section.number("factor", usual)  # only null means the ratio
    scale = section.optional_number("mscale")
    scale_all = section.optional_number("mscale_all_dim")
    usual = _yarn_attention(factor, 1.0)
    if scale and scale_all:  # 0 counts as none, as Devstral 2 has it
        usual = _yarn_attention(factor, scale) / _yarn_attention(factor, scale_all)
    # vLLM's name for a multiple of the usual factor; DeepSeek's R1 distill of Qwen 3 has it.
    usual *= section.number("attn_factor", 1.0)
    return {
        "factor": factor,
        "original_context": original,
        "attention_factor": section.number("attention_factor", usual),
        "beta_fast": section.number("beta_fast", 32.0),
        "beta_slow": section.number("beta_slow", 1.0),
        "truncate": section.flag("truncate", True),
    }


def _yarn_attention(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original_context(config: ConfigReader, section: ConfigReader) -> int:
    """Read the length before scaling, of the config where its class has that setting."""
    key = "original_max_position_embeddings"
    if config.has_default(key):
        section.value(key)
        return config.integer(key)
    return section.integer(key, config.integer("max_position_embeddings"))


_READERS = {
    RopeScaling.NONE: _none,
    RopeScaling.LINEAR: _linear,
    RopeScaling.LLAMA3: _llama3,
    RopeScaling.LONGROPE: _longrope,
    RopeScaling.YARN: _yarn,
    RopeScaling.PROPORTIONAL: _proportional,
}
