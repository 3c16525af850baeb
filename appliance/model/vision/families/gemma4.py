"""Gemma 4 with a tower: E2B, E4B, 26B-A4B and 31B. The 12B takes pixels without one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.names import TensorNames
from appliance.model.spec import AttentionSpec, NormSpec
from appliance.model.vision.families.family import (
    CLIP_NAMES,
    CLIP_SCALE,
    EMBEDDING,
    NO_NORM,
    PROJECTOR,
    TOWER,
    ClipMapping,
    ClipSettings,
    TowerFamily,
    read_axial_rope,
    read_layers,
)
from appliance.model.vision.spec import (
    AxisTables,
    PatchSpec,
    ProjectorLinear,
    ProjectorSpec,
    SeesAhead,
    TowerSpec,
)

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    width, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    text = whole.section("text_config")
    sees = text.value("use_bidirectional_attention") == "vision"
    return TowerSpec(
        layers=_layers(config, eps),
        patch=PatchSpec(
            f"{TOWER}patch_embedder.input_proj",
            config.integer("patch_size"),
            bias=False,
            channels_last=True,
            from_zero=True,
        ),
        table=AxisTables(
            f"{TOWER}patch_embedder.position_embedding_table",
            config.integer("position_embedding_size"),
        ),
        merge=config.integer("pooling_kernel_size"),
        projector=ProjectorSpec(
            (ProjectorLinear(f"{PROJECTOR}embedding_projection", bias=False),),
            averages=True,
            norm=NormSpec(eps, weight=False),
            scale=width**0.5,
            standard=f"{TOWER}std_" if config.flag("standardize") else "",
        ),
        rows_see_ahead=SeesAhead.WINDOWS if sees else SeesAhead.NOWHERE,
        last_norm=False,
        turns_by_halves=True,
        clips=config.flag("use_clipped_linears"),
    )


def _layers(config: ConfigReader, eps: float) -> DecoderSpec:
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.integer("head_dim")
    if heads * head_dim != width or head_dim % 4:
        raise config.refuse("head_dim", f"a multiple of 4, and {heads} of them {width}")
    if config.integer("num_key_value_heads") != heads:
        raise config.refuse("num_key_value_heads", f"{heads}, as num_attention_heads")
    read = read_layers(
        config,
        "gemma4",
        NormSpec(eps),
        act="hidden_activation",
        rope=read_axial_rope(config, head_dim, usual=100.0),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=False,
        gated=True,
    )
    layer = read.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    # Elements that only fill a head are 0, and count in its mean square.
    norm = NormSpec(eps * head_dim / layer.mixer.head_dim)
    layer = replace(
        layer,
        mixer=replace(layer.mixer, scale=1.0, qk_norm=norm, value_norm=norm),
        post_norms=True,
    )
    return replace(read, layers=(layer,) * len(read.layers))


def _clip(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    heads = vision["num_attention_heads"]
    more = {
        "num_key_value_heads": heads,
        "head_dim": vision["hidden_size"] // heads,
        "rms_norm_eps": vision["layer_norm_eps"],
        "pooling_kernel_size": clip.integer(CLIP_SCALE, 3),
        "position_embedding_size": clip.table_rows(),
        "standardize": "v.std_bias" in clip.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in clip.tensors,
    }
    return {"vision_config": vision | more}


GEMMA4 = TowerFamily(
    name="gemma4",
    tower_types={"gemma4": "gemma4_vision"},
    read=_read,
    names=TensorNames(
        embedding=EMBEDDING,
        final_norm=NO_NORM,
        layer=f"{TOWER}encoder.layers.{{}}.",
        qkv=tuple(f"self_attn.{part}_proj.linear" for part in "qkv"),
        output="self_attn.o_proj.linear",
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        gate_up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
        down="mlp.down_proj.linear",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    places=(("model.vision_tower.", "model.embed_vision."),),
    clip=ClipMapping(
        "gemma4v",
        {"gemma4": "gemma4"},
        _clip,
        {
            f"{TOWER}patch_embedder.input_proj": "v.patch_embd",
            f"{TOWER}patch_embedder.position_embedding_table": "v.position_embd.weight",
            f"{TOWER}std_bias": "v.std_bias",
            f"{TOWER}std_scale": "v.std_scale",
            f"{PROJECTOR}embedding_projection": "mm.input_projection",
        },
        names=replace(
            CLIP_NAMES,
            final_norm=NO_NORM,
            query_norm="attn_q_norm",
            key_norm="attn_k_norm",
            mixer_post_norm="attn_post_norm",
            gate_up=("ffn_gate", "ffn_up"),
            mlp_post_norm="ffn_post_norm",
        ),
        always=frozenset({"gemma4"}),
        merge=CLIP_SCALE,
    ),
)
