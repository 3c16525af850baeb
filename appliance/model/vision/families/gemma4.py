"""Gemma 4: E2B, E4B, 26B-A4B and 31B with a tower, and the 12B, whose decoder reads pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.names import TensorNames
from appliance.model.spec import AttentionSpec, DecoderSpec, NormSpec
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

_PATCH_NORM = NormSpec(1e-5, centered=True)  # the class's of pixels, embeddings and positions


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    width, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
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
        rows_see_ahead=_sees(whole),
        last_norm=False,
        turns_by_halves=True,
        clips=config.flag("use_clipped_linears"),
    )


def _sees(whole: ConfigReader) -> SeesAhead:
    text = whole.section("text_config")
    sees = text.value("use_bidirectional_attention") == "vision"
    return SeesAhead.WINDOWS if sees else SeesAhead.NOWHERE


def _read_unified(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    eps = config.number("rms_norm_eps")
    return TowerSpec(
        layers=DecoderSpec(
            architecture="gemma4",
            hidden_size=config.integer("mm_embed_dim"),
            vocab_size=1,
            context_length=1,
            layers=(),
            final_norm=NormSpec(eps),
            tied_head=True,
        ),
        patch=PatchSpec(
            f"{TOWER}patch_dense",
            config.integer("patch_size") * config.integer("pooling_kernel_size"),
            channels_last=True,
            norm=_PATCH_NORM,
            norm_name=f"{TOWER}patch_ln1",
        ),
        table=AxisTables(
            f"{TOWER}pos_embedding", config.integer("mm_posemb_size"), axes_second=True
        ),
        merge=1,
        projector=ProjectorSpec(
            (ProjectorLinear(f"{PROJECTOR}embedding_projection", bias=False),),
            norm=NormSpec(eps, weight=False),
        ),
        rows_see_ahead=_sees(whole),
        first_norm=_PATCH_NORM,
        first_norm_name=f"{TOWER}patch_ln2",
        positions_last=True,
        sum_norm=_PATCH_NORM,
        sum_norm_name=f"{TOWER}pos_norm",
        last_norm=False,
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


def _clip_unified(clip: ClipSettings) -> dict[str, Any]:
    return {
        "vision_config": {
            "patch_size": clip.integer("patch_size"),
            "pooling_kernel_size": clip.integer("projector.scale_factor", 3),
            "mm_embed_dim": clip.integer("embedding_length"),
            "mm_posemb_size": clip.table_rows(),
            "rms_norm_eps": clip.number("attention.layer_norm_epsilon"),
        }
    }


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
GEMMA4_UNIFIED = TowerFamily(
    name="gemma4_unified",
    tower_types={"gemma4_unified": "gemma4_unified_vision"},
    read=_read_unified,
    names=TensorNames(embedding=EMBEDDING, final_norm=NO_NORM),
    places=(
        ("model.vision_embedder.", "model.embed_vision."),
        ("model.embed_vision.", "model.embed_vision.multimodal_embedder."),
    ),
    clip=ClipMapping(
        "gemma4uv",
        {"gemma4": "gemma4_unified"},
        _clip_unified,
        {
            f"{TOWER}patch_ln1": "v.patch_norm.1",
            f"{TOWER}patch_dense": "v.patch_embd",
            f"{TOWER}patch_ln2": "v.patch_norm.2",
            f"{TOWER}pos_embedding": "v.position_embd.weight",
            f"{TOWER}pos_norm": "v.patch_norm.3",
            f"{PROJECTOR}embedding_projection": "mm.input_projection",
        },
        names=replace(CLIP_NAMES, final_norm=NO_NORM),
    ),
)
