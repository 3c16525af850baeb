"""Qwen 2 VL, and Qwen 2.5 VL with windows in most layers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
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
    PatchWindows,
    ProjectorLinear,
    ProjectorSpec,
    TowerSpec,
)

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-6  # of all norms, in the classes' code
_SECTIONS = (16, 24, 24)  # where the settings have none
_WINDOW = 112  # pixels of a window, which files leave out
_PLACES = (("model.visual.", ""), ("visual.", ""))


def _read_2(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    width = config.integer("embed_dim")
    layers = read_layers(
        config,
        "qwen2_vl",
        NormSpec(_EPSILON, centered=True),
        count="depth",
        heads="num_heads",
        width="embed_dim",
        inner=int(width * config.number("mlp_ratio")),
        rope=read_axial_rope(config, width // config.integer("num_heads")),
    )
    return _tower(whole, config, layers, None)


def _read_2_5(whole: ConfigReader, config: ConfigReader) -> TowerSpec:
    layers = read_layers(
        config,
        "qwen2_5_vl",
        NormSpec(_EPSILON),
        count="depth",
        heads="num_heads",
        rope=read_axial_rope(config, config.integer("hidden_size") // config.integer("num_heads")),
        gated=True,
    )
    cell = config.integer("patch_size") * config.integer("spatial_merge_size")
    windows = PatchWindows(
        config.integer("window_size") // cell,
        tuple(config.layers("fullatt_block_indexes", len(layers.layers))),
    )
    if not windows.cells:
        raise config.refuse("window_size", f"{cell} pixels, those of a cell, or more")
    return _tower(whole, config, layers, windows)


def _tower(
    whole: ConfigReader, config: ConfigReader, layers: DecoderSpec, windows: PatchWindows | None
) -> TowerSpec:
    return TowerSpec(
        layers=layers,
        patch=PatchSpec(
            f"{TOWER}patch_embed.proj",
            config.integer("patch_size"),
            bias=False,
            frames=config.integer("temporal_patch_size"),
        ),
        table=None,
        merge=config.integer("spatial_merge_size"),
        text_axes=read_text_axes(whole, _SECTIONS),
        projector=ProjectorSpec(
            (
                ProjectorLinear(f"{TOWER}merger.mlp.0", activation=Activation.GELU),
                ProjectorLinear(f"{TOWER}merger.mlp.2"),
            )
        ),
        windows=windows,
    )


def _names(gate_up: tuple[str, ...], down: str) -> TensorNames:
    return TensorNames(
        embedding=EMBEDDING,
        final_norm=f"{TOWER}merger.ln_q",
        layer=f"{TOWER}blocks.{{}}.",
        mixer_norm="norm1",
        mlp_norm="norm2",
        qkv=("attn.qkv",),
        output="attn.proj",
        gate_up=gate_up,
        down=down,
    )


def _clip_2(clip: ClipSettings) -> dict[str, Any]:
    found = _clip(clip)
    vision = found["vision_config"]
    width = vision["hidden_size"]
    # The width in the settings is the text's; llama.cpp goes by the tensors, too.
    inner = prod(clip.tensors.get("v.blk.0.ffn_up.weight", (0,))) // width
    return {
        "vision_config": vision
        | {
            "embed_dim": width,
            "mlp_ratio": inner / width,
            "hidden_size": clip.integer("projection_dim"),
        }
    }


def _clip_2_5(clip: ClipSettings) -> dict[str, Any]:
    found = _clip(clip)
    vision, period = found["vision_config"], clip.integer("n_wa_pattern")
    whole = range(period - 1, vision["depth"], period)
    size = clip.integer("window_size", _WINDOW)
    return {"vision_config": vision | {"fullatt_block_indexes": [*whole], "window_size": size}}


def _clip(clip: ClipSettings) -> dict[str, Any]:
    vision = clip.layers_of_tower()
    more = {
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "spatial_merge_size": clip.integer("spatial_merge_size", 2),
    }
    return {"vision_config": vision | more}


_APART = ("attn.q", "attn.k", "attn.v")
_OUTSIDE = {
    f"{TOWER}patch_embed.proj": "v.patch_embd",
    f"{TOWER}merger.mlp.0": "mm.0",
    f"{TOWER}merger.mlp.2": "mm.2",
}
_NAMES_2 = _names(("mlp.fc1",), "mlp.fc2")
_NAMES_2_5 = _names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
QWEN2_VL = TowerFamily(
    name="qwen2_vl",
    tower_types={"qwen2_vl": "qwen2_vl_vision"},
    read=_read_2,
    names=_NAMES_2,
    places=_PLACES,
    clip=ClipMapping(
        "qwen2vl_merger",
        {"qwen2vl": "qwen2_vl"},
        _clip_2,
        _OUTSIDE,
        own_names=replace(_NAMES_2, qkv=_APART),
        always=frozenset({"qwen2vl"}),
    ),
)
QWEN2_5_VL = TowerFamily(
    name="qwen2_5_vl",
    tower_types={"qwen2_5_vl": "qwen2_5_vl_vision"},
    read=_read_2_5,
    names=_NAMES_2_5,
    places=_PLACES,
    clip=ClipMapping(
        "qwen2.5vl_merger",
        {"qwen2vl": "qwen2_5_vl"},
        _clip_2_5,
        _OUTSIDE,
        names=replace(CLIP_NAMES, gate_up=("ffn_gate", "ffn_up")),
        own_names=replace(_NAMES_2_5, qkv=_APART),
    ),
)
