"""Qwen 3 VL, and Qwen 3.5 and 3.6, whose tower is the same without DeepStack."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import Activation
from appliance.model.names import TensorNames
from appliance.model.spec import NormSpec
from appliance.model.vision.families.family import (
    CLIP_NAMES,
    EMBEDDING,
    TOWER,
    ClipMapping,
    ClipSettings,
    TowerFamily,
    read_axial_rope,
    read_layers,
    read_text_axes,
)
from appliance.model.vision.spec import (
    PatchSpec,
    PositionTable,
    ProjectorLinear,
    ProjectorSpec,
    Resize,
    TowerSpec,
)

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader

_NORM = NormSpec(1e-6, centered=True)  # of all norms, in the class's code


# What the classes take where the settings have no sections.
_SECTIONS = {"qwen3_vl": (24, 20, 20), "qwen3_vl_moe": (24, 20, 20)}
_SECTIONS_OF_3_5 = (11, 11, 10)


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    head_dim = config.integer("hidden_size") // config.integer("num_heads")
    rope = read_axial_rope(config, head_dim)
    layers = read_layers(config, "qwen3_vl", _NORM, count="depth", heads="num_heads", rope=rope)
    sections = _SECTIONS.get(whole.text("model_type"), _SECTIONS_OF_3_5)
    taps = config.layers("deepstack_visual_indexes", len(layers.layers))
    return TowerSpec(
        layers=layers,
        patch=PatchSpec(
            f"{TOWER}patch_embed.proj",
            config.integer("patch_size"),
            frames=config.integer("temporal_patch_size"),
        ),
        table=PositionTable(
            f"{TOWER}pos_embed.weight",
            math.isqrt(config.integer("num_position_embeddings")),
            Resize.CORNERS,
        ),
        merge=config.integer("spatial_merge_size"),
        text_axes=read_text_axes(whole, sections, interleaved=True),
        projector=_merger(f"{TOWER}merger."),
        taps=tuple(
            (tap, _merger(f"{TOWER}deepstack_merger_list.{place}.", normed=True))
            for place, tap in enumerate(taps)
        ),
    )


def _merger(prefix: str, *, normed: bool = False) -> ProjectorSpec:
    """Return a merger; its norm is the tower's last, or with `normed` of a cell."""
    return ProjectorSpec(
        (
            ProjectorLinear(f"{prefix}linear_fc1", activation=Activation.GELU),
            ProjectorLinear(f"{prefix}linear_fc2"),
        ),
        norm=_NORM if normed else None,
        norm_name=f"{prefix}norm",
    )


def _clip(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    tapped = clip.value("is_deepstack_layers", [])
    return {
        "vision_config": vision
        | {
            "depth": vision["num_hidden_layers"],
            "num_heads": vision["num_attention_heads"],
            "num_position_embeddings": clip.table_rows(),
            "spatial_merge_size": clip.integer("spatial_merge_size", 2),
            "deepstack_visual_indexes": [layer for layer, is_tap in enumerate(tapped) if is_tap],
        }
    }


_CLIP_WHOLES = {
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
QWEN3_VL = TowerFamily(
    name="qwen3_vl",
    tower_types={
        "qwen3_vl": "qwen3_vl_vision",
        "qwen3_vl_moe": "qwen3_vl_moe_vision",
        "qwen3_5": "qwen3_5_vision",
        "qwen3_5_moe": "qwen3_5_moe_vision",
    },
    read=_read,
    names=TensorNames(
        embedding=EMBEDDING,
        final_norm=f"{TOWER}merger.norm",
        layer=f"{TOWER}blocks.{{}}.",
        mixer_norm="norm1",
        mlp_norm="norm2",
        qkv=("attn.qkv",),
        output="attn.proj",
        gate_up=("mlp.linear_fc1",),
        down="mlp.linear_fc2",
    ),
    places=(("model.visual.", ""), ("visual.", "")),
    clip=ClipMapping(
        "qwen3vl_merger",
        _CLIP_WHOLES,
        _clip,
        {
            f"{TOWER}patch_embed.proj": "v.patch_embd",
            f"{TOWER}pos_embed": "v.position_embd",
            f"{TOWER}merger.linear_fc1": "mm.0",
            f"{TOWER}merger.linear_fc2": "mm.2",
            f"{TOWER}deepstack_merger_list.{{}}.norm": "v.deepstack.{}.norm",
            f"{TOWER}deepstack_merger_list.{{}}.linear_fc1": "v.deepstack.{}.fc1",
            f"{TOWER}deepstack_merger_list.{{}}.linear_fc2": "v.deepstack.{}.fc2",
        },
        names=replace(CLIP_NAMES, qkv=("attn_qkv",)),
        tapped=frozenset({"qwen3_vl", "qwen3_vl_moe"}),
        always=frozenset(_CLIP_WHOLES),
    ),
)
