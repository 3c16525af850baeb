"""Gemma 4, text only: 26B-A4B, 31B, 12B, E2B and E4B.

Five layers with a window alternate with one without, whose heads are wider and whose values may be
its keys. The last layers may read the keys and values of earlier ones. Small models add token
embeddings after each layer; one runs experts beside the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from appliance.errors import CheckpointError
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    kv_heads,
    num_layers,
    of_layers,
)
from appliance.model.families.rope import scaled_rope, section_of_layers
from appliance.model.families.standard import (
    layer_keys,
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
    read_window,
)
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS
from appliance.model.names import ExpertNames, TensorNames, TokenInputNames
from appliance.model.spec import MLPSpec, NormSpec, TokenInputSpec

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, ExpertsSpec, RopeSpec


_STANDS_STILL = 1e20  # a pair with a larger frequency divisor does not rotate
_PATTERN = 6  # every sixth layer has no window
_ACTIVATION = "hidden_activation"
_UNIFIED = "gemma4_unified_text"  # of the 12B: no token embeddings after layers, and no experts


def read_gemma4_gguf(file: GGUFFile) -> dict[str, Any]:
    """Convert a file's metadata to a Hugging Face config.

    Raises:
        CheckpointError: a setting or tensor is missing or wrong.
        UnsupportedModelError: a setting asks for unsupported arithmetic.
    """
    return gguf_config(file, "gemma4", _extra)


def _extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    layers, names = num_layers(meta), file.tensor_names()
    slides = _slides(meta, layers)
    readers = meta.integer("attention.shared_kv_layers", 0)
    own_full = [index for index in range(layers - readers) if not slides[index]]
    local, full = _head_dims(meta)
    heads = kv_heads(meta, meta.integer("attention.head_count"))
    heads *= layers if len(heads) == 1 else 1
    widths = of_layers(meta, "feed_forward_length")
    wide = max(widths) != min(widths)
    if wide and max(widths) != 2 * min(widths):
        raise meta.refuse("feed_forward_length", "one width, or twice it in some layers")
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        **gguf_biases(file, attention="attention_bias"),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": wide,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "sliding_window": meta.integer("attention.sliding_window"),
        "head_dim": local,
        "global_head_dim": full,
        "num_key_value_heads": max([1, *(h for h, s in zip(heads, slides, strict=True) if s)]),
        "num_global_key_value_heads": max(
            [1, *(h for h, s in zip(heads, slides, strict=True) if not s)]
        ),
        "attention_k_eq_v": bool(own_full) and f"blk.{own_full[0]}.attn_v.weight" not in names,
        "num_kv_shared_layers": readers,
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": _file_ropes(meta, file, full),
    }
    config |= _file_token_input(meta, file) | _experts(meta)
    # No key says it; llama.cpp, too, goes by the inputs that the models without it have.
    if not config.get("hidden_size_per_layer_input"):
        config["use_bidirectional_attention"] = "vision"
    return config


def _slides(meta: ConfigReader, layers: int) -> list[bool]:
    key = "attention.sliding_window_pattern"
    listed = meta.value(key)
    if not isinstance(listed, list) or len(listed) != layers:
        raise meta.refuse(key, f"a list of {layers} layers")
    return [bool(item) for item in listed]


def _head_dims(meta: ConfigReader) -> tuple[int, int]:
    """Read the head width of layers with and without a window."""
    full = meta.integer("attention.key_length")
    local = meta.integer("attention.key_length_swa", full)
    if meta.integer("attention.value_length_swa", local) != local:
        raise meta.refuse("attention.value_length_swa", f"{local}, as the keys have")
    if meta.integer("rope.dimension_count_swa", local) != local:
        raise meta.refuse("rope.dimension_count_swa", f"{local}, as a head has")
    return local, full


def _file_ropes(meta: ConfigReader, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    share = 1.0
    if FREQUENCY_DIVISORS in file.tensor_names():
        factors = cast("Tensor", file.load(FREQUENCY_DIVISORS)).flatten().tolist()
        turning = sum(factor == 1.0 for factor in factors)
        still = sum(factor > _STANDS_STILL for factor in factors)
        if turning + still != len(factors) or 2 * len(factors) != head_dim or not turning:
            raise CheckpointError(
                f"{file.path}: tensor {FREQUENCY_DIVISORS} must have 1 for the first of "
                f"{head_dim // 2} pairs of a head, and nearly no end for the others; use another "
                "file of the model"
            )
        share = turning / len(factors)
    base = meta.number("rope.freq_base", 1000000.0)
    return {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
        },
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": base,
            "partial_rotary_factor": share,
        },
    }


def _file_token_input(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    width, table = (
        meta.integer("embedding_length_per_layer_input", 0),
        "per_layer_token_embd.weight",
    )
    if not width:
        return {"hidden_size_per_layer_input": 0}
    if table not in file.tensor_names():
        raise CheckpointError(
            f"{file.path}: tensor {table} is missing; use another file of the model"
        )
    return {
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": file.shape(table)[0],
    }


def _experts(meta: ConfigReader) -> dict[str, Any]:
    if not meta.value("expert_count"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": meta.integer("expert_count"),
        "top_k_experts": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
    }


def _read(config: ConfigReader) -> DecoderSpec:
    num_layers = config.integer("num_hidden_layers")
    slides = read_layer_types(config, [(i + 1) % _PATTERN != 0 for i in range(num_layers)])
    slides[-1] = False  # whatever its type says, as transformers reads it
    window = read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    if config.value("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.refuse(
            "use_bidirectional_attention", "null, or vision, whose tokens are not read"
        )
    first_reader = num_layers - config.integer("num_kv_shared_layers")
    sources = _sources(config, slides, first_reader)
    local, full = _heads(config, slides)
    ropes = _ropes(config, local.head_dim, full.head_dim)
    norm = NormSpec(config.number("rms_norm_eps"))
    attention = [
        read_attention(
            config,
            ropes[0] if sliding else ropes[1],
            (local if sliding else full).head_dim,
            num_kv_heads=(local if sliding else full).num_kv_heads,
            window=window if sliding else None,
            scale=1.0,
            qkv_bias=config.flag("attention_bias"),
            output_bias=config.flag("attention_bias"),
            qk_norm=norm,
            value_norm=norm,
            keys_are_values=config.flag("attention_k_eq_v") and not sliding,
            kv_layer=source,
        )
        for sliding, source in zip(slides, sources, strict=True)
    ]
    return read_decoder(
        config,
        "gemma4",
        attention,
        activation=_ACTIVATION,
        mlps=_mlps(config, sources),
        post_norms=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        output_scale=True,
        token_input=_token_input(config, norm),
    )


class _Heads(NamedTuple):
    head_dim: int
    num_kv_heads: int


def _heads(config: ConfigReader, slides: list[bool]) -> tuple[_Heads, _Heads]:
    """Read the heads of layers with and without a window.

    transformers writes differences per layer; older configs have separate settings.
    """
    local = _Heads(
        read_head_dim(config),
        config.integer("num_key_value_heads", config.integer("num_attention_heads")),
    )
    if not config.is_given("per_layer_config"):
        kv_heads = config.integer("num_global_key_value_heads", local.num_kv_heads)
        shared = config.flag("attention_k_eq_v")
        head_dim = config.integer("global_head_dim")
        return local, _Heads(head_dim, kv_heads if shared else local.num_kv_heads)
    layers, found = config.section("per_layer_config"), set[_Heads]()
    keys = layer_keys(layers, config.value("per_layer_config"), len(slides))
    for index, sliding in enumerate(slides):
        own = layers.section(keys.get(index, str(index)))
        heads = _Heads(
            own.integer("head_dim", local.head_dim),
            own.integer("num_key_value_heads", local.num_kv_heads),
        )
        own.refuse_unknown(frozenset())
        if not sliding:
            found.add(heads)
        elif heads != local:
            raise layers.refuse(keys[index], "no change in a layer with a window")
    if len(found) > 1:
        raise config.refuse("per_layer_config", "the same heads in all layers without a window")
    return local, found.pop() if found else local


def _sources(config: ConfigReader, slides: list[bool], first: int) -> list[int | None]:
    """Return the layer whose keys and values each layer reads: from `first` on, an earlier one's.

    It is the last layer of the same type before `first`.
    """
    found: list[int | None] = [None] * len(slides)
    for index in range(max(first, 0), len(slides)):
        same = [i for i in range(first) if slides[i] == slides[index]]
        if not same:
            raise CheckpointError(
                f"{config.origin}: num_kv_shared_layers is {len(slides) - first}, but must leave "
                f"layer {index} one of its type to read from; take the config.json of its makers"
            )
        found[index] = same[-1]
    return found


def _ropes(config: ConfigReader, local_dim: int, full_dim: int) -> tuple[RopeSpec, RopeSpec]:
    sections = config.section("rope_parameters")
    local = section_of_layers(sections, "sliding_attention")
    full = section_of_layers(sections, "full_attention")
    sections.refuse_unknown(frozenset())
    return scaled_rope(config, local, None, local_dim), scaled_rope(config, full, None, full_dim)


def _mlps(config: ConfigReader, sources: list[int | None]) -> list[MLPSpec | ExpertsSpec]:
    """Read the MLPs; layers that read another layer's keys may have MLPs of twice the width."""
    width, act = config.integer("intermediate_size"), read_activation(config, _ACTIVATION)
    wide = 2 * width if config.flag("use_double_wide_mlp") else width
    if not config.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.value(key)  # without effect
        return [MLPSpec(width if source is None else wide, act) for source in sources]
    if wide != width:
        raise config.refuse("use_double_wide_mlp", "false in a model with experts")
    experts = read_experts(
        config,
        count="num_experts",
        chosen="top_k_experts",
        activation_key=_ACTIVATION,
        shared_width=width,
        expert_scale=True,
        own_norms=True,
    )
    return [experts for _ in sources]


def _token_input(config: ConfigReader, norm: NormSpec) -> TokenInputSpec | None:
    width = config.integer("hidden_size_per_layer_input", 0)
    if not width:
        return None
    rows, vocab_size = (
        config.integer("vocab_size_per_layer_input"),
        config.integer("vocab_size"),
    )
    if rows < vocab_size:
        raise CheckpointError(
            f"{config.origin}: vocab_size_per_layer_input is {rows}, but must be at least "
            f"vocab_size = {vocab_size}; take the config.json of its makers"
        )
    return TokenInputSpec(width, rows, read_activation(config, _ACTIVATION), norm)


_GGUF_NAMES = replace(
    GGUF_NAMES,
    output_scale="layer_output_scale.weight",
    token_input=TokenInputNames(
        embedding="per_layer_token_embd",
        projection="per_layer_model_proj",
        norm="per_layer_proj_norm",
        gate="inp_gate",
        up="proj",
        layer_norm="post_norm",
    ),
    experts=replace(
        GGUF_NAMES.experts, shared_gate_up=("ffn_gate", "ffn_up"), shared_down="ffn_down"
    ),
)

GEMMA4 = Family(
    name="gemma4",
    model_type="gemma4_text",
    architectures=("Gemma4ForCausalLM",),
    read=_read,
    gguf=GGUFMapping("gemma4", read_gemma4_gguf, _GGUF_NAMES),
    names=TensorNames(
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        output_scale="layer_scalar",
        token_input=TokenInputNames(
            embedding="model.embed_tokens_per_layer",
            projection="model.per_layer_model_projection",
            norm="model.per_layer_projection_norm",
            gate="per_layer_input_gate",
            up="per_layer_projection",
            layer_norm="post_per_layer_input_norm",
        ),
        experts=ExpertNames(
            router="router.proj",
            router_norm="router.scale",
            expert_scale="router.per_expert_scale",
            input_norm="pre_feedforward_layernorm_2",
            shared_norm="post_feedforward_layernorm_1",
            output_norm="post_feedforward_layernorm_2",
            gate_up=("experts.{}.gate_proj", "experts.{}.up_proj"),
            down="experts.{}.down_proj",
            shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
            shared_down="mlp.down_proj",
            stacked_gate_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
        ),
    ),
)

# The 12B has its own configuration class, with other defaults.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    model_type=_UNIFIED,
    architectures=("Gemma4UnifiedForCausalLM",),
    gguf=None,
)
