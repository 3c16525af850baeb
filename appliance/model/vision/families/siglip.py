"""SigLIP: SmolVLM, Idefics 3 and Gemma 3; with grids of any size in LFM2-VL and PaddleOCR-VL."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import Activation
from appliance.model.families.standard import read_activation
from appliance.model.names import TensorNames
from appliance.model.spec import NormSpec
from appliance.model.vision.families.family import (
    CLIP_SCALE,
    EMBEDDING,
    PROJECTOR,
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
    SeesAhead,
    TowerSpec,
)

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, RopeSpec

_NAMES = TensorNames(
    embedding=EMBEDDING,
    final_norm=f"{TOWER}post_layernorm",
    layer=f"{TOWER}encoder.layers.{{}}.",
    mixer_norm="layer_norm1",
    mlp_norm="layer_norm2",
    output="self_attn.out_proj",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)
_PATCH = f"{TOWER}embeddings.patch_embedding"
_TABLE = f"{TOWER}embeddings.position_embedding.weight"

_PROJECTOR_NORM = NormSpec(1e-5, centered=True)  # in the classes' code
_PADDLEOCR_SECTIONS = (16, 24, 24)  # where the settings have none


def _layers(config: ConfigReader, rope: RopeSpec | None = None) -> DecoderSpec:
    norm = NormSpec(config.number("layer_norm_eps"), centered=True)
    return read_layers(config, "siglip", norm, rope=rope)


def _read_idefics3(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    patch = config.integer("patch_size")
    projection = ProjectorLinear(f"{PROJECTOR}modality_projection.proj", bias=False)
    return TowerSpec(
        layers=_layers(config),
        patch=PatchSpec(_PATCH, patch),
        table=PositionTable(_TABLE, config.integer("image_size") // patch, Resize.NEAREST),
        merge=whole.integer("scale_factor"),
        projector=ProjectorSpec((projection,)),
    )


def _read_gemma3(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    patch, eps = config.integer("patch_size"), config.number("layer_norm_eps")
    side = config.integer("image_size") // patch
    rows = math.isqrt(whole.integer("mm_tokens_per_image"))
    projection = ProjectorLinear(
        f"{PROJECTOR}mm_input_projection_weight", bias=False, stored_transposed=True
    )
    return TowerSpec(
        layers=_layers(config),
        patch=PatchSpec(_PATCH, patch),
        table=PositionTable(_TABLE, side, Resize.NEAREST),
        merge=side // rows,
        projector=ProjectorSpec(
            (projection,),
            averages=True,
            norm=NormSpec(eps, offset=1.0),
            norm_name=f"{PROJECTOR}mm_soft_emb_norm",
        ),
        rows_see_ahead=SeesAhead.EVERYWHERE,
    )


def _read_lfm2(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    bias = whole.flag("projector_bias", True)
    act = read_activation(whole, "projector_hidden_act", gated=False)
    return TowerSpec(
        layers=_layers(config),
        patch=PatchSpec(_PATCH, config.integer("patch_size"), channels_last=True),
        table=PositionTable(_TABLE, math.isqrt(config.integer("num_patches")), Resize.AREA),
        merge=whole.integer("downsample_factor"),
        projector=ProjectorSpec(
            (
                ProjectorLinear(f"{PROJECTOR}linear_1", bias, act),
                ProjectorLinear(f"{PROJECTOR}linear_2", bias),
            ),
            norm=_PROJECTOR_NORM if whole.flag("projector_use_layernorm", True) else None,
            norm_name=f"{PROJECTOR}layer_norm",
        ),
    )


def _read_paddleocr(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    patch = config.integer("patch_size")
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return TowerSpec(
        layers=_layers(config, read_axial_rope(config, head_dim)),
        patch=PatchSpec(_PATCH, patch),
        table=PositionTable(_TABLE, config.integer("image_size") // patch, Resize.BILINEAR),
        merge=config.integer("spatial_merge_size"),
        text_axes=read_text_axes(whole, _PADDLEOCR_SECTIONS),
        projector=ProjectorSpec(
            (
                ProjectorLinear(f"{PROJECTOR}linear_1", activation=Activation.GELU),
                ProjectorLinear(f"{PROJECTOR}linear_2"),
            ),
            norm=_PROJECTOR_NORM,
            norm_name=f"{PROJECTOR}pre_norm",
            norms_patches=True,
        ),
    )


_CLIP_OUTSIDE = {
    _PATCH: "v.patch_embd",
    f"{TOWER}embeddings.position_embedding": "v.position_embd",
}


def _clip_idefics3(clip: ClipSettings) -> dict[str, Any]:
    return {
        "vision_config": clip.layers_of_tower(),
        "scale_factor": clip.integer(CLIP_SCALE),
    }


def _clip_gemma3(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    rows = vision["image_size"] // vision["patch_size"] // clip.integer(CLIP_SCALE, 4)
    return {"vision_config": vision, "mm_tokens_per_image": rows**2}


def _clip_lfm2(clip: ClipSettings) -> dict[str, Any]:
    return {
        "vision_config": clip.layers_of_tower() | {"num_patches": clip.table_rows()},
        "downsample_factor": clip.integer(CLIP_SCALE, 2),
        "projector_bias": "mm.1.bias" in clip.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in clip.tensors,
    }


def _clip_paddleocr(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    # The file's side is that of the largest picture.
    vision["image_size"] = math.isqrt(clip.table_rows()) * vision["patch_size"]
    merge = clip.integer("spatial_merge_size", 2)
    return {"vision_config": vision | {"spatial_merge_size": merge}}


IDEFICS3 = TowerFamily(
    name="idefics3",
    tower_types={"idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision"},
    read=_read_idefics3,
    names=_NAMES,
    places=(("model.vision_model.", "model.connector."),),
    clip=ClipMapping(
        "idefics3",
        {"llama": "smolvlm"},
        _clip_idefics3,
        _CLIP_OUTSIDE | {f"{PROJECTOR}modality_projection.proj": "mm.model.fc"},
        merge=CLIP_SCALE,
    ),
)
GEMMA3 = TowerFamily(
    name="gemma3",
    tower_types={"gemma3": "siglip_vision_model"},
    read=_read_gemma3,
    names=_NAMES,
    places=(
        ("model.vision_tower.", "model.multi_modal_projector."),
        ("vision_tower.vision_model.", "multi_modal_projector."),
        ("vision_tower.", "multi_modal_projector."),
    ),
    clip=ClipMapping(
        "gemma3",
        {"gemma3": "gemma3"},
        _clip_gemma3,
        _CLIP_OUTSIDE
        | {
            f"{PROJECTOR}mm_input_projection_weight": "mm.input_projection.weight",
            f"{PROJECTOR}mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        merge=CLIP_SCALE,
    ),
)
LFM2_VL = TowerFamily(
    name="lfm2_vl",
    tower_types={"lfm2_vl": "siglip2_vision_model"},
    read=_read_lfm2,
    names=_NAMES,
    places=(
        ("model.vision_tower.", "model.multi_modal_projector."),
        ("model.vision_tower.vision_model.", "model.multi_modal_projector."),
    ),
    clip=ClipMapping(
        "lfm2",
        {"lfm2": "lfm2_vl", "lfm2moe": "lfm2_vl"},
        _clip_lfm2,
        _CLIP_OUTSIDE
        | {
            f"{PROJECTOR}layer_norm": "mm.input_norm",
            f"{PROJECTOR}linear_1": "mm.1",
            f"{PROJECTOR}linear_2": "mm.2",
        },
        merge=CLIP_SCALE,
    ),
)
PADDLEOCR_VL = TowerFamily(
    name="paddleocr_vl",
    tower_types={"paddleocr_vl": "paddleocr_vl_vision"},
    read=_read_paddleocr,
    names=_NAMES,
    places=(
        ("model.visual.vision_model.", "model.projector."),
        ("visual.vision_model.", "mlp_AR."),
    ),
    clip=ClipMapping(
        "paddleocr",
        {"paddleocr": "paddleocr_vl"},
        _clip_paddleocr,
        _CLIP_OUTSIDE
        | {
            f"{PROJECTOR}pre_norm": "mm.input_norm",
            f"{PROJECTOR}linear_1": "mm.1",
            f"{PROJECTOR}linear_2": "mm.2",
        },
        always=frozenset({"paddleocr"}),
    ),
)
