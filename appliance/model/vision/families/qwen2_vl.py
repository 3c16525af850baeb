"""Qwen 2 VL, and Qwen 2.5 VL with windows in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation
from appliance.model.names import TensorNames
from appliance.model.spec import NormSpec
from appliance.model.vision.families.family import (
    EMBEDDING,
    TOWER,
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


QWEN2_VL = TowerFamily(
    name="qwen2_vl",
    tower_types={"qwen2_vl": "qwen2_vl_vision"},
    read=_read_2,
    names=_names(("mlp.fc1",), "mlp.fc2"),
    places=_PLACES,
)
QWEN2_5_VL = TowerFamily(
    name="qwen2_5_vl",
    tower_types={"qwen2_5_vl": "qwen2_5_vl_vision"},
    read=_read_2_5,
    names=_names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    places=_PLACES,
)
