"""Tiny random models with a vision tower, and pictures as their classes take them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support.models.whole_models import TEXT

from appliance.model.families.gemma4 import GEMMA4
from appliance.model.source import open_model
from appliance.model.vision.positions import patch_places

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.source import ModelSource

SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 2}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class TowerCase:
    """A tiny model with a tower.

    Attributes:
        grids: rows and columns of patches of each picture.
        pixels: arranges patches (rows, columns, 3, size, size) as the class wants its inputs.
    """

    kind: str
    vision: dict[str, Any]
    grids: tuple[tuple[int, int], ...]
    pixels: Callable[[list[np.ndarray]], dict[str, Any]]
    text: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


def as_images(grids: list[np.ndarray]) -> dict[str, Any]:
    """Pixels (1, count, 3, height, width) of pictures of one size."""
    images = [
        one.transpose(2, 0, 3, 1, 4).reshape(3, one.shape[0] * one.shape[3], -1) for one in grids
    ]
    return {"pixel_values": torch.tensor(np.stack(images)[None])}


def as_batch(grids: list[np.ndarray]) -> dict[str, Any]:
    return {"pixel_values": as_images(grids)["pixel_values"][0]}


def as_sized(grids: list[np.ndarray]) -> dict[str, Any]:
    """Pixels of Pixtral's classes, (count, 3, height, width) padded to the largest, with sizes."""
    sizes = [(one.shape[0] * one.shape[3], one.shape[1] * one.shape[4]) for one in grids]
    padded = torch.zeros(len(grids), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for place, (one, (height, width)) in enumerate(zip(grids, sizes, strict=True)):
        padded[place, :, :height, :width] = as_images([one])["pixel_values"][0, 0]
    return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}


def as_cells(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of Qwen's classes: cell by cell, each frame twice."""
    rows = []
    for one in grids:
        places = patch_places(one.shape[0], one.shape[1], 2)
        patches = one[places[0], places[1]]  # (count, 3, size, size)
        rows.append(np.repeat(patches[:, :, None], 2, 2).reshape(len(patches), -1))
    thw = torch.tensor([(1, *one.shape[:2]) for one in grids])
    return {"pixel_values": torch.tensor(np.concatenate(rows)), "image_grid_thw": thw}


def as_patches(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of PaddleOCR-VL's classes, (count, 3, size, size), row by row."""
    thw = torch.tensor([(1, *one.shape[:2]) for one in grids])
    patches = np.concatenate([one.reshape(-1, *one.shape[2:]) for one in grids])
    return {"pixel_values": torch.tensor(patches), "image_grid_thw": thw}


def as_placed(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of Gemma 4, channels last, padded to the longest, with columns and rows."""
    rows = [one.transpose(0, 1, 3, 4, 2).reshape(one.shape[0] * one.shape[1], -1) for one in grids]
    longest = max(map(len, rows))
    pixels = np.stack([np.pad(one, ((0, longest - len(one)), (0, 0))) for one in rows])
    places = np.full((len(grids), longest, 2), -1)
    for place, one in zip(places, grids, strict=True):
        across, down = np.meshgrid(range(one.shape[1]), range(one.shape[0]))
        place[: across.size] = np.stack((across.ravel(), down.ravel()), 1)
    return {"pixel_values": torch.tensor(pixels), "image_position_ids": torch.tensor(places)}


def as_naflex(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of SigLIP 2, channels last, padded to the longest, with masks and shapes."""
    rows = [one.transpose(0, 1, 3, 4, 2).reshape(one.shape[0] * one.shape[1], -1) for one in grids]
    longest = max(map(len, rows))
    pixels = np.stack([np.pad(one, ((0, longest - len(one)), (0, 0))) for one in rows])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in rows])
    shapes = torch.tensor([one.shape[:2] for one in grids])
    return {
        "pixel_values": torch.tensor(pixels),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


_QWEN = {"hidden_size": 40, "intermediate_size": 56, "num_heads": 2, "depth": 4}
_QWEN |= {"out_hidden_size": 64, "num_position_embeddings": 25}
_GLM = {"hidden_size": 40, "intermediate_size": 96, "num_heads": 2, "depth": 3}
_GLM |= {"out_hidden_size": 64, "image_size": 70}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_HALF_ROPE = _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
TOWER_CASES = {
    "smolvlm": TowerCase(
        "smolvlm", SIZES | LAYERS | {"image_size": 56, "patch_size": 7}, ((8, 8), (8, 8)),
        as_images, whole={"scale_factor": 2},
    ),
    "idefics3": TowerCase(
        "idefics3", SIZES | LAYERS | {"image_size": 42, "patch_size": 7}, ((6, 6),),
        as_images, whole={"scale_factor": 3},
    ),
    "gemma3": TowerCase(
        "gemma3",
        SIZES | LAYERS | {"image_size": 56, "patch_size": 7, "vision_use_head": False},
        ((8, 8), (8, 8), (8, 8)), as_batch,
        whole={"mm_tokens_per_image": 16, "tie_word_embeddings": False},
        text={
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,  # a head's width, as files have it
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": TowerCase(
        "gemma4",
        SIZES | LAYERS
        | {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 40,
            "standardize": True,
        },
        ((6, 9), (3, 3), (12, 3)), as_placed,
        text={
            "sliding_window": 9,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "use_bidirectional_attention": "vision",
        },
        whole={"audio_config": None},
    ),
    "gemma4_unified": TowerCase(
        "gemma4_unified",
        {
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 40,
            "mm_posemb_size": 40,
            "output_proj_dims": 40,
        },
        ((2, 4), (1, 1), (4, 1)), as_placed,
        text={
            "sliding_window": 16,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": False,  # else each token is followed by itself
        },
        whole={"audio_config": None, "tie_word_embeddings": False},
    ),
    "gemma4_clipped": TowerCase(
        "gemma4",
        SIZES | LAYERS
        | {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 40,
            "use_clipped_linears": True,
        },
        ((6, 9), (3, 3), (12, 3)), as_placed,
        text={
            "sliding_window": 9,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "tie_word_embeddings": False,
        },
        whole={"audio_config": None, "tie_word_embeddings": False},
    ),
    "lfm2_vl": TowerCase(
        "lfm2_vl",
        SIZES | LAYERS | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
        ((8, 8), (2, 6), (10, 2)), as_naflex, whole={"projector_hidden_size": 72},
    ),
    "qwen2_vl": TowerCase(
        "qwen2_vl",
        {"embed_dim": 40, "hidden_size": 64, "mlp_ratio": 3, "num_heads": 2, "depth": 3},
        ((6, 8), (2, 2), (10, 2)), as_cells,
        text={"rope_parameters": _ROPE},
    ),
    "qwen2_5_vl": TowerCase(
        "qwen2_5_vl",
        {"hidden_size": 40, "intermediate_size": 56, "num_heads": 2, "depth": 5,
         "out_hidden_size": 64, "fullatt_block_indexes": [1, 4], "window_size": 56},
        ((6, 10), (2, 2), (10, 2), (4, 8)), as_cells,
        text={"rope_parameters": _ROPE},
    ),
    "qwen3_vl": TowerCase(
        "qwen3_vl", _QWEN | {"deepstack_visual_indexes": [0, 2]}, ((6, 8), (2, 2), (10, 2)),
        as_cells, text={"rope_parameters": _ROPE | {"mrope_interleaved": True}},
    ),
    "qwen3_5": TowerCase(
        "qwen3_5", _QWEN, ((6, 8), (2, 2), (10, 2)), as_cells,
        text={
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": _HALF_ROPE | {"mrope_interleaved": True},
        },
    ),
    "glm4v": TowerCase(
        "glm4v", _GLM, ((6, 8), (2, 2), (10, 2)), as_cells,
        text={"rope_parameters": _HALF_ROPE},
    ),
    "glm4v_moe": TowerCase(
        "glm4v_moe", _GLM | {"attention_bias": True}, ((6, 8), (10, 2)), as_cells,
        text={
            "rope_parameters": _HALF_ROPE,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "glm_ocr": TowerCase(
        "glm_ocr", _GLM | {"hidden_size": 32}, ((6, 8), (2, 2), (10, 2)), as_cells,
        text={"rope_parameters": _ROPE},
    ),
    "internvl": TowerCase(
        "internvl",
        SIZES | LAYERS | {"image_size": [56, 56], "patch_size": [7, 7], "attention_bias": True},
        ((8, 8), (8, 8)), as_batch,
    ),
    "internvl of 6B": TowerCase(
        "internvl",
        SIZES | LAYERS
        | {"hidden_size": 48, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
           "use_qk_norm": True, "norm_type": "rms_norm"},
        ((6, 6),), as_batch,
    ),
    "internvl with a last norm": TowerCase(
        "internvl",
        SIZES | LAYERS | {"image_size": 28, "patch_size": 7, "use_mean_pooling": False},
        ((4, 4), (4, 4)), as_batch,
    ),
    "paddleocr_vl": TowerCase(
        "paddleocr_vl", SIZES | LAYERS | {"image_size": 70}, ((6, 8), (2, 2), (10, 2)),
        as_patches, text={"rope_parameters": _ROPE},
    ),
    "pixtral_gelu": TowerCase(
        "mistral3",
        SIZES | LAYERS | {"model_type": "pixtral", "image_size": 140, "hidden_act": "gelu"},
        ((4, 2),), as_sized, text={"model_type": "ministral3"},
    ),
    "mistral3": TowerCase(
        "mistral3",
        SIZES | LAYERS
        | {"model_type": "pixtral", "image_size": 140, "patch_size": 14, "hidden_act": "silu"},
        ((6, 8), (2, 2), (10, 2)), as_sized, text={"model_type": "ministral3"},
    ),
}  # fmt: skip


# Most of inputs and of outputs; linears of the same input clip it alike.
_CLIPS = {
    "q_proj": (1.1, 0.8), "k_proj": (1.1, 0.9), "v_proj": (1.1, 0.7), "o_proj": (0.4, 1.2),
    "gate_proj": (1.2, 0.9), "up_proj": (1.2, 0.8), "down_proj": (0.5, 0.6),
}  # fmt: skip


def with_tower(case: TowerCase, seed: int = 1) -> Any:
    """Build a random model, whose tower's every part shows in the rows."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    made = transformers.AutoConfig.for_model(case.kind).__class__
    config = made(text_config=TEXT | case.text, vision_config=case.vision, **case.whole)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, names[case.kind])(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "position" not in name and "pos_embed" not in name:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("std_bias", "std_scale")):  # made without numbers
                buffer.normal_(generator=generator)
            if name.endswith(("put_min", "put_max")):
                linear, end = name.split(".")[-2:]
                buffer.fill_(_CLIPS[linear][end.startswith("output")])
                buffer.mul_(-0.9 if end.endswith("min") else 1)
    return model


# Architectures of GGUF files of texts whose folders are read as another family's.
_ARCHITECTURES = {
    "glm4v_moe": "glm4moe",
    "paddleocr_vl": "paddleocr",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "mistral3": "mistral3",
}


def text_of(folder: Path, kind: str) -> ModelSource:
    """The text of a folder's model, as if it had come from a GGUF file."""
    text = open_model(folder, in_torch=False)
    mapping = text.family.gguf or GEMMA4.gguf  # files call both of its classes one architecture
    assert mapping is not None
    mapping = replace(mapping, architecture=_ARCHITECTURES.get(kind, mapping.architecture))
    return replace(text, family=replace(text.family, gguf=mapping))
