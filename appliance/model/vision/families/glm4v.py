"""GLM-4.1V to 4.6V, and GLM-OCR, whose tower has neither a table nor a first norm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import Activation
from appliance.model.families.standard import read_activation
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
    read_side,
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

_MERGER_NORM = NormSpec(1e-5, centered=True)  # in the class's code
_SECTIONS = (8, 12, 12)  # where the settings have none


def _read(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    is_ocr = whole.text("model_type") == "glm_ocr"
    norm, patch = NormSpec(config.number("rms_norm_eps")), read_side(config, "patch_size")
    bias = config.flag("attention_bias")
    table = PositionTable(
        f"{TOWER}embeddings.position_embedding.weight",
        read_side(config, "image_size") // patch,
        Resize.BICUBIC,
    )
    return TowerSpec(
        layers=read_layers(
            config,
            "glm4v",
            norm,
            count="depth",
            heads="num_heads",
            inner=None if is_ocr else config.integer("out_hidden_size"),
            rope=read_axial_rope(
                config, config.integer("hidden_size") // config.integer("num_heads")
            ),
            attention_bias=bias,
            output_bias=bias and is_ocr,
            qk_norm=norm if is_ocr else None,
            mlp_bias=bias and is_ocr,
            gated=True,
        ),
        patch=PatchSpec(
            f"{TOWER}patch_embed.proj", patch, frames=config.integer("temporal_patch_size")
        ),
        table=None if is_ocr else table,
        merge=config.integer("spatial_merge_size"),
        text_axes=read_text_axes(whole, _SECTIONS),
        projector=_projector(config),
        first_norm=None if is_ocr else norm,
        first_norm_name=f"{TOWER}post_conv_layernorm",
        positions_last=True,
    )


def _projector(config: ConfigReader) -> ProjectorSpec:
    return ProjectorSpec(
        (
            ProjectorLinear(f"{TOWER}downsample", channels_first=True),
            ProjectorLinear(
                f"{TOWER}merger.proj",
                bias=False,
                activation=Activation.GELU,
                norm=_MERGER_NORM,
                norm_name=f"{TOWER}merger.post_projection_norm",
            ),
            ProjectorLinear(
                f"{TOWER}merger.up_proj",
                bias=False,
                activation=read_activation(config, gated=False),
                gate=f"{TOWER}merger.gate_proj",
            ),
            ProjectorLinear(f"{TOWER}merger.down_proj", bias=False),
        )
    )


def _clip(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    more = {
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        # The width of the layers' MLPs here; feed_forward_length is the merger's.
        "out_hidden_size": clip.tensors.get("v.blk.0.ffn_down.weight", (0, 0))[-1],
        "rms_norm_eps": vision["layer_norm_eps"],
        "attention_bias": "v.blk.0.attn_qkv.bias" in clip.tensors,
        "spatial_merge_size": clip.integer("spatial_merge_size", 2),
    }
    return {"vision_config": vision | more}


GLM4V = TowerFamily(
    name="glm4v",
    tower_types={
        "glm4v": "glm4v_vision",
        "glm46v": "glm4v_vision",
        "glm4v_moe": "glm4v_moe_vision",
        "glm_ocr": "glm_ocr_vision",
    },
    read=_read,
    names=TensorNames(
        embedding=EMBEDDING,
        final_norm=f"{TOWER}post_layernorm",
        layer=f"{TOWER}blocks.{{}}.",
        mixer_norm="norm1",
        mlp_norm="norm2",
        qkv=("attn.qkv",),
        query_norm="attn.q_norm",
        key_norm="attn.k_norm",
        output="attn.proj",
        gate_up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
    ),
    places=(("model.visual.", ""), ("visual.", "")),
    clip=ClipMapping(
        "glm4v",
        {"glm4moe": "glm4v_moe"},  # of "glm4" the rotated rows are stored in another order
        _clip,
        {
            f"{TOWER}patch_embed.proj": "v.patch_embd",
            f"{TOWER}post_conv_layernorm": "v.norm_embd",
            f"{TOWER}embeddings.position_embedding": "v.position_embd",
            f"{TOWER}downsample": "mm.patch_merger",
            f"{TOWER}merger.proj": "mm.model.fc",
            f"{TOWER}merger.post_projection_norm": "mm.post_norm",
            f"{TOWER}merger.gate_proj": "mm.gate",
            f"{TOWER}merger.up_proj": "mm.up",
            f"{TOWER}merger.down_proj": "mm.down",
        },
        names=replace(CLIP_NAMES, qkv=("attn_qkv",), gate_up=("ffn_gate", "ffn_up")),
    ),
)
