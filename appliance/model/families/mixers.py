"""Reads the settings of mixers that several families have: latent attention, and Mamba-2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.activation import Activation
from appliance.model.families.gguf_config import gguf_mamba2
from appliance.model.families.rope import read_rope, rope_kind, rope_section
from appliance.model.families.standard import read_activation
from appliance.model.recurrent_spec import Mamba2Spec
from appliance.model.spec import LatentAttentionSpec, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import RopeSpec

# Names of recurrent and of attention layers in newer and older configs.
RECURRENT_NAMES = ("linear_attention", "mamba")
ATTENTION_NAMES = ("full_attention", "attention")
_BEYOND_STEPS = 1e30  # softplus of no float32 near it is taken
_FLOAT = "__float__"  # key of numbers that JSON lacks, such as Infinity
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


def read_mamba2(
    config: ConfigReader,
    *,
    heads: str = "mamba_n_heads",
    head_dim: str = "mamba_d_head",
    groups: str = "mamba_n_groups",
    state: str = "mamba_d_state",
    taps: str = "mamba_d_conv",
    bias: str = "mamba_proj_bias",
    filter_bias: str = "mamba_conv_bias",
    activation: str = "hidden_act",
    eps: str = "rms_norm_eps",
    expand: str | None = "mamba_expand",
) -> Mamba2Spec:
    """Read the settings under these names; heads must fill `expand` hidden sizes, if set.

    Raises:
        CheckpointError: numbers contradict each other.
        UnsupportedModelError: a setting asks for unsupported arithmetic.
    """
    if read_activation(config, activation) is not Activation.SILU:
        raise config.refuse(activation, "silu in Mamba-2 layers")
    if not _is_unbounded(config.value("time_step_limit", [0.0, math.inf])):
        raise config.refuse("time_step_limit", "[0.0, Infinity]")
    num_heads, num_groups = config.integer(heads), config.integer(groups)
    if num_heads % num_groups:
        raise config.refuse(groups, f"a divisor of {heads}, {num_heads}")
    width = _read_width(config, head_dim, heads, expand)
    return Mamba2Spec(
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=width,
        state_dim=config.integer(state),
        taps=config.integer(taps),
        norm=NormSpec(config.number(eps)),
        bias=config.flag(bias),
        filter_bias=config.flag(filter_bias),
    )


def _read_width(config: ConfigReader, key: str, heads: str, expand: str | None) -> int:
    if expand is None:
        return config.integer(key)
    num_heads, hidden_size = config.integer(heads), config.integer("hidden_size")
    values = config.integer(expand) * hidden_size
    width = values // num_heads if config.value(key) == "auto" else config.integer(key)
    if width * num_heads != values:
        raise CheckpointError(
            f"{config.origin}: {key} is {width}, but {heads}, {num_heads}, must have {values} "
            f"elements, {expand} times hidden_size; take the config.json of its makers"
        )
    return width


def _is_unbounded(limits: object) -> bool:
    """Return True for limits of steps that no step reaches: 0, and Infinity in any spelling."""
    if not isinstance(limits, list) or len(limits) != 2:
        return False
    least, most = limits
    if isinstance(most, dict):
        most = most.get(_FLOAT)
    if most in ("Infinity", "inf"):
        most = math.inf
    is_number = isinstance(most, int | float) and not isinstance(most, bool)
    return least == 0 and is_number and most >= _BEYOND_STEPS


def gguf_mamba2_settings(meta: ConfigReader, file: GGUFFile, layer: int) -> dict[str, Any]:
    """Read a GGUF file's settings of Mamba-2 layers, such as `layer`, under a config's names."""
    mamba2 = gguf_mamba2(meta, file, layer)
    return {
        "mamba_expand": meta.integer("ssm.inner_size") // meta.integer("embedding_length"),
        "mamba_n_heads": mamba2["heads"],
        "mamba_d_head": mamba2["head_dim"],
        "mamba_n_groups": mamba2["groups"],
        "mamba_d_state": mamba2["state"],
        "mamba_d_conv": mamba2["taps"],
        "mamba_conv_bias": mamba2["filter_bias"],
        "mamba_proj_bias": mamba2["bias"],
    }
