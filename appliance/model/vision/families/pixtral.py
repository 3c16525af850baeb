"""Pixtral's tower in Mistral Small 3.1 and later, and Ministral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.reader import class_defaults, text_type
from appliance.model.families.standard import read_activation
from appliance.model.names import TensorNames
from appliance.model.spec import AxisFrequencies, NormSpec, RopeSpec
from appliance.model.vision.families.family import (
    CLIP_NAMES,
    EMBEDDING,
    PROJECTOR,
    TOWER,
    ClipMapping,
    ClipSettings,
    TowerFamily,
    read_layers,
)
from appliance.model.vision.spec import PatchSpec, ProjectorLinear, ProjectorSpec, TowerSpec

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader

_NORM = NormSpec(1e-5)  # in the class's code


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    if whole.value("vision_feature_layer") not in (None, -1):
        raise whole.refuse("vision_feature_layer", "-1, the last")
    usual = config.integer("hidden_size") // config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", usual)
    of_axis = head_dim // 4
    rope = RopeSpec(
        theta=config.section("rope_parameters").number("rope_theta", 1e4),
        rotary_dim=head_dim,
        sections=(0, of_axis, of_axis),
        axis_frequencies=AxisFrequencies.EVERY_OTHER,
    )
    kind = whole.section("text_config").text("model_type", text_type("mistral3"))
    text = whole.section("text_config", class_defaults(kind))
    bias = whole.flag("multimodal_projector_bias")
    act = read_activation(whole, "projector_hidden_act", gated=False)
    return TowerSpec(
        layers=read_layers(
            config,
            "pixtral",
            _NORM,
            rope=rope,
            attention_bias=False,
            mlp_bias=False,
            gated=True,
            final_norm=NormSpec(text.number("rms_norm_eps")),
        ),
        patch=PatchSpec(f"{TOWER}patch_conv", config.integer("patch_size"), bias=False),
        table=None,
        merge=whole.integer("spatial_merge_size"),
        projector=ProjectorSpec(
            (
                ProjectorLinear(
                    f"{PROJECTOR}patch_merger.merging_layer", bias=False, channels_first=True
                ),
                ProjectorLinear(f"{PROJECTOR}linear_1", bias, act),
                ProjectorLinear(f"{PROJECTOR}linear_2", bias),
            )
        ),
        first_norm=_NORM,
        first_norm_name=f"{TOWER}ln_pre",
    )


def _clip(clip: ClipSettings) -> dict[str, Any]:
    return {
        "vision_config": clip.layers_of_tower() | {"hidden_act": clip.activation("gelu")},
        "spatial_merge_size": clip.integer("spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in clip.tensors,
    }


MISTRAL3 = TowerFamily(
    name="mistral3",
    tower_types={"mistral3": "pixtral"},
    read=_read,
    names=TensorNames(
        embedding=EMBEDDING,
        final_norm=f"{PROJECTOR}norm",
        layer=f"{TOWER}transformer.layers.{{}}.",
        mixer_norm="attention_norm",
        mlp_norm="ffn_norm",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        output="attention.o_proj",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    places=(
        ("model.vision_tower.", "model.multi_modal_projector."),
        ("vision_tower.", "multi_modal_projector."),
    ),
    clip=ClipMapping(
        "pixtral",
        {"llama": "mistral3", "mistral3": "mistral3"},
        _clip,
        {
            f"{TOWER}patch_conv": "v.patch_embd",
            f"{TOWER}ln_pre": "v.pre_ln",
            f"{PROJECTOR}patch_merger.merging_layer": "mm.patch_merger",
            f"{PROJECTOR}linear_1": "mm.1",
            f"{PROJECTOR}linear_2": "mm.2",
        },
        names=replace(CLIP_NAMES, final_norm="mm.input_norm", gate_up=("ffn_gate", "ffn_up")),
        interleaved_rope=True,
        always=frozenset({"mistral3"}),
    ),
)
