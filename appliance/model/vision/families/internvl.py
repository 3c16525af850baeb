"""InternVL 2.5 to 3.5 as transformers has them: square tiles with a class token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.head_norms import HeadNormKind
from appliance.model.families.standard import read_activation
from appliance.model.names import TensorNames
from appliance.model.spec import NormSpec
from appliance.model.vision.families.family import (
    CLIP_NAMES,
    CLIP_SCALE,
    EMBEDDING,
    PROJECTOR,
    TOWER,
    ClipMapping,
    ClipSettings,
    TowerFamily,
    read_layers,
    read_side,
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

# Defaults of the classes' norms.
_QK_NORM = NormSpec(1e-6)
_PROJECTOR_NORM = NormSpec(1e-5, centered=True)
_NORMS = {"layer_norm": True, "rms_norm": False}  # and if they are centered


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    if whole.value("vision_feature_layer") not in (None, -1):
        raise whole.refuse("vision_feature_layer", "-1, the last")
    if whole.value("vision_feature_select_strategy") not in (None, "default"):
        raise whole.refuse("vision_feature_select_strategy", "default, patches alone")
    if not config.flag("use_absolute_position_embeddings", True):
        raise config.refuse("use_absolute_position_embeddings", "true")
    patch = read_side(config, "patch_size")
    has_norm = not config.flag("use_mean_pooling", True)
    act = read_activation(whole, "projector_hidden_act", gated=False)
    return TowerSpec(
        layers=read_layers(
            config,
            "internvl",
            NormSpec(config.number("layer_norm_eps"), centered=_is_centered(config)),
            attention_bias=config.flag("attention_bias"),
            output_bias=True,
            qk_norm=_QK_NORM if config.flag("use_qk_norm") else None,
            head_norms=HeadNormKind.ALL,
            final_norm=NormSpec(config.number("layer_norm_eps"), centered=has_norm),
        ),
        patch=PatchSpec(f"{TOWER}embeddings.patch_embeddings.projection", patch),
        table=PositionTable(
            f"{TOWER}embeddings.position_embeddings",
            read_side(config, "image_size") // patch,
            Resize.BICUBIC,
        ),
        merge=round(1 / whole.number("downsample_ratio")),
        projector=ProjectorSpec(
            (
                ProjectorLinear(f"{PROJECTOR}linear_1", activation=act),
                ProjectorLinear(f"{PROJECTOR}linear_2"),
            ),
            norm=_PROJECTOR_NORM,
            norm_name=f"{PROJECTOR}layer_norm",
        ),
        first_row=f"{TOWER}embeddings.cls_token",
        scales=("lambda_1", "lambda_2"),
        last_norm=has_norm,
    )


def _is_centered(config: ConfigReader) -> bool:
    kind = config.text("norm_type")
    if kind not in _NORMS:
        raise config.refuse("norm_type", ", ".join(_NORMS))
    return _NORMS[kind]


def _clip(clip: ClipSettings) -> dict[str, Any]:
    is_centered = "v.blk.0.ln1.bias" in clip.tensors
    more = {
        "hidden_act": clip.activation("gelu"),
        "attention_bias": "v.blk.0.attn_q.bias" in clip.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in clip.tensors,
        "use_mean_pooling": "v.post_ln.weight" not in clip.tensors,
        "norm_type": "layer_norm" if is_centered else "rms_norm",
    }
    return {
        "vision_config": clip.layers_of_tower() | more,
        "downsample_ratio": 1 / clip.integer(CLIP_SCALE),
    }


INTERNVL = TowerFamily(
    name="internvl",
    tower_types={"internvl": "internvl_vision"},
    read=_read,
    names=TensorNames(
        embedding=EMBEDDING,
        final_norm=f"{TOWER}layernorm",
        layer=f"{TOWER}encoder.layer.{{}}.",
        mixer_norm="layernorm_before",
        mlp_norm="layernorm_after",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        query_norm="attention.q_norm",
        key_norm="attention.k_norm",
        output="attention.projection_layer",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
    ),
    places=(
        ("model.vision_tower.", "model.multi_modal_projector."),
        ("vision_tower.", "multi_modal_projector."),
    ),
    clip=ClipMapping(
        "internvl",
        dict.fromkeys(("qwen2", "qwen3", "llama", "internlm2"), "internvl"),
        _clip,
        {
            f"{TOWER}embeddings.patch_embeddings.projection": "v.patch_embd",
            f"{TOWER}embeddings.position_embeddings": "v.position_embd.weight",
            f"{TOWER}embeddings.cls_token": "v.class_embd",
            f"{PROJECTOR}layer_norm": "mm.model.mlp.0",
            f"{PROJECTOR}linear_1": "mm.model.mlp.1",
            f"{PROJECTOR}linear_2": "mm.model.mlp.3",
        },
        names=replace(CLIP_NAMES, query_norm="attn_q_norm", key_norm="attn_k_norm"),
        scales=("ls1.weight", "ls2.weight"),
        merge=CLIP_SCALE,
    ),
)
