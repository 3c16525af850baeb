"""GGUF projector files (`mmproj`) of small models, as llama.cpp's converter writes them.

Settings and transforms are those of conversion/base.py (MmprojModel), smolvlm.py, gemma.py,
lfm2.py, internvl.py, llava.py, qwenvl.py and
qwen3vl.py; names of tensors are gguf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGMLQuantizationType, GGUFType
from gguf.constants import Keys, VisionProjectorType
from support.gguf.gguf_files import known_name, write_gguf_file

if TYPE_CHECKING:
    from support.models.towers import TowerCase
    from torch import Tensor

TYPES = {
    "smolvlm": VisionProjectorType.IDEFICS3,
    "idefics3": VisionProjectorType.IDEFICS3,
    "gemma3": VisionProjectorType.GEMMA3,
    "gemma4": VisionProjectorType.GEMMA4V,
    "gemma4_unified": "gemma4uv",  # younger than gguf's table
    "glm4v_moe": VisionProjectorType.GLM4V,
    "internvl": VisionProjectorType.INTERNVL,
    "lfm2_vl": VisionProjectorType.LFM2,
    "paddleocr_vl": VisionProjectorType.PADDLEOCR,
    "qwen2_vl": VisionProjectorType.QWEN2VL,
    "qwen2_5_vl": VisionProjectorType.QWEN25VL,
    "qwen3_vl": VisionProjectorType.QWEN3VL,
    "qwen3_5": VisionProjectorType.QWEN3VL,
    "mistral3": VisionProjectorType.PIXTRAL,
}
_PARTS = (
    "vision_tower.",
    "embed_vision.",
    "vision_model.",
    "connector.",
    "multi_modal_projector.",
    "visual.",
    "projector.",
)
_VISION = Keys.ClipVision


def write_projector(
    path: Path,
    model: Any,
    processor: dict[str, Any],
    packed: Callable[[str, Any], Any] = lambda name, data: None,
    **changes: Any,
) -> Path:
    """Write the tower and projector of a transformers model.

    Args:
        processor: its image processor's settings, of which the file has some.
        packed: gives a tensor's type, from its name and numbers; None writes float32.
        changes: settings by what follows `clip.vision.`; None leaves one out.
    """
    settings = _settings(model.config, processor)
    settings |= {f"clip.vision.{key}": value for key, value in changes.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        own = name.removeprefix("model.")
        if own.startswith(_PARTS):
            tensors |= dict(_tensors(own, tensor.detach(), model.config))
    if model.config.model_type == "mistral3":
        table = model.get_input_embeddings().weight.detach()
        tensors["v.token_embd.img_break"] = table[12]
    present = {f".{key}": value for key, value in settings.items() if value is not None}
    return write_gguf_file(path, "clip", present, tensors, packed)


def is_written(case: TowerCase) -> bool:
    """True if the converter can write it; it knows no last norm of InternVL."""
    return case.kind in TYPES and "use_mean_pooling" not in case.vision


def as_published(case: TowerCase) -> TowerCase:
    """The same model as far as files can tell it.

    Qwen2.5-VL has windows of 112 pixels and layers without them at intervals; Gemma 4's pictures
    see themselves where no layer has inputs from tokens.
    """
    if case.text.get("use_bidirectional_attention"):
        apart = {"tie_word_embeddings": False}  # else each token is followed by itself
        text = case.text | apart | {"hidden_size_per_layer_input": 0}
        return replace(case, text=text, whole=case.whole | apart)
    if case.kind != "qwen2_5_vl":
        return case
    seen = {"fullatt_block_indexes": [1, 3], "window_size": 112}
    return replace(case, vision=case.vision | seen)


def q8_0(name: str, data: Any) -> GGMLQuantizationType | None:
    """What `--outtype q8_0` stores in 8 bits: matrices that blocks of 32 fill, patches apart."""
    kept = "patch_embd" in name or "patch_merger" in name or "position_embd" in name
    if kept or "input_projection" in name or data.ndim != 2 or data.shape[1] % 32:
        return None
    return GGMLQuantizationType.Q8_0


def f16(name: str, data: Any) -> GGMLQuantizationType | None:
    """What `--outtype f16` stores in 16 bits."""
    return GGMLQuantizationType.F16 if data.ndim > 1 and "position" not in name else None


def bf16(name: str, data: Any) -> GGMLQuantizationType | None:
    """What `--outtype bf16` stores in 16 bits."""
    kept = "position" in name or "patch" in name
    return GGMLQuantizationType.BF16 if data.ndim > 1 and not kept else None


def _settings(config: Any, processor: dict[str, Any]) -> dict[str, Any]:
    kind, vision = config.model_type, config.vision_config
    if kind == "gemma4_unified":
        return {
            "general.type": GGUFType.MMPROJ,
            Keys.Clip.HAS_VISION_ENCODER: True,
            _VISION.PROJECTOR_TYPE: TYPES[kind],
            _VISION.PATCH_SIZE: vision.patch_size,
            _VISION.EMBEDDING_LENGTH: vision.mm_embed_dim,
            _VISION.BLOCK_COUNT: 0,
            _VISION.IMAGE_MEAN: processor["image_mean"],
            _VISION.IMAGE_STD: processor["image_std"],
            _VISION.Attention.LAYERNORM_EPS: 1e-6,
        }
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    found: dict[str, Any] = {
        "general.type": GGUFType.MMPROJ,
        Keys.Clip.HAS_VISION_ENCODER: True,
        Keys.Clip.PROJECTOR_TYPE: str(TYPES[kind]),
        _VISION.PROJECTION_DIM: config.get_text_config().hidden_size,
        _VISION.PATCH_SIZE: vision.patch_size,
        _VISION.EMBEDDING_LENGTH: vision.hidden_size,
        _VISION.FEED_FORWARD_LENGTH: getattr(vision, "intermediate_size", 0),
        _VISION.BLOCK_COUNT: depth,
        _VISION.Attention.HEAD_COUNT: getattr(vision, "num_heads", None)
        or vision.num_attention_heads,
        _VISION.IMAGE_SIZE: getattr(vision, "image_size", 256),
        _VISION.IMAGE_MEAN: processor["image_mean"],
        _VISION.IMAGE_STD: processor["image_std"],
        _VISION.Attention.LAYERNORM_EPS: getattr(vision, "layer_norm_eps", 1e-5),
        _VISION.USE_GELU: True,
    }
    if kind == "glm4v_moe":
        found[_VISION.Attention.LAYERNORM_EPS] = vision.rms_norm_eps
        found[_VISION.USE_SILU] = found.pop(_VISION.USE_GELU)
    if kind == "paddleocr_vl":
        found[_VISION.IMAGE_SIZE] = 1536  # of the largest picture
    if kind.startswith("qwen2"):
        found[_VISION.IMAGE_SIZE] = 560
        del found[_VISION.USE_GELU]
    if kind == "qwen2_vl":
        found[_VISION.EMBEDDING_LENGTH] = vision.embed_dim
        found[_VISION.FEED_FORWARD_LENGTH] = vision.hidden_size
    if kind == "qwen2_5_vl":
        found[_VISION.USE_SILU] = True
        found[_VISION.N_WA_PATTERN] = vision.fullatt_block_indexes[0] + 1
    if kind.startswith("qwen3"):
        found[_VISION.IMAGE_SIZE] = int(vision.num_position_embeddings**0.5 * vision.patch_size)
        found[_VISION.SPATIAL_MERGE_SIZE] = vision.spatial_merge_size
        found[_VISION.Attention.LAYERNORM_EPS] = config.text_config.rms_norm_eps
        taps = getattr(vision, "deepstack_visual_indexes", None) or []
        found[_VISION.IS_DEEPSTACK_LAYERS] = [layer in taps for layer in range(depth)]
    if kind in ("smolvlm", "idefics3"):
        found[_VISION.Projector.SCALE_FACTOR] = config.scale_factor
        found[_VISION.PREPROC_IMAGE_SIZE] = processor["size"]["longest_edge"]
    if kind == "internvl":
        found[_VISION.IMAGE_SIZE] = vision.image_size[0]
        found[_VISION.PATCH_SIZE] = vision.patch_size[0]
        found[_VISION.Projector.SCALE_FACTOR] = int(1 / config.downsample_ratio)
    if kind == "lfm2_vl":
        found[_VISION.Projector.SCALE_FACTOR] = config.downsample_factor
    if kind == "gemma3":
        side = vision.image_size // vision.patch_size
        scale = side // int(config.mm_tokens_per_image**0.5)
        found |= {_VISION.Projector.SCALE_FACTOR: scale} if scale != 4 else {}
    if kind == "gemma4":
        found[_VISION.PROJECTOR_TYPE] = found.pop(Keys.Clip.PROJECTOR_TYPE)
        found |= {_VISION.IMAGE_SIZE: 224, _VISION.Attention.LAYERNORM_EPS: 1e-6}
        del found[_VISION.USE_GELU]
    if kind == "mistral3":
        found[_VISION.SPATIAL_MERGE_SIZE] = config.spatial_merge_size
        if vision.hidden_act == "silu":
            del found[_VISION.USE_GELU]
            found[_VISION.USE_SILU] = True
    return found


def _tensors(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that one becomes, under their names in a file."""
    kind, vision = config.model_type, config.vision_config
    if kind == "gemma4_unified":
        yield _of_pixels(name.removeprefix("embed_vision."), tensor)
        return
    if name == "vision_tower.patch_embedder.input_proj.weight":
        size = vision.patch_size
        tensor = tensor.view(len(tensor), size, size, 3).permute(0, 3, 1, 2)
    if kind == "lfm2_vl" and "patch_embedding.weight" in name:
        size = vision.patch_size
        tensor = tensor.view(len(tensor), size, size, 3).permute(0, 3, 1, 2)
    if kind == "mistral3" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = tensor.reshape(vision.num_attention_heads, 2, -1, tensor.shape[1])
        tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
    if "soft_emb_norm" in name:
        tensor = tensor + 1
    if kind.startswith("qwen2") and ".qkv." in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield known_name(name.replace("qkv", part), "clip", vision.depth), rows
    elif name.startswith("visual.deepstack_merger_list."):
        _, _, place, part, ending = name.split(".")
        layer = vision.deepstack_visual_indexes[int(place)]
        yield f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{ending}", tensor
    elif name.startswith("visual.merger.") and kind.startswith("qwen3"):
        _, _, part, ending = name.split(".")
        own = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[part]
        yield f"{own}.{ending}", tensor
    elif name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    else:
        depth = getattr(vision, "depth", None) or vision.num_hidden_layers
        # gguf's table has so many numbers as a tower has layers, and projectors have up to 3.
        yield _stored(name, kind, max(depth, 4)), tensor.reshape(tensor.shape or (1,))


_UNIFIED = {
    "patch_ln1": "v.patch_norm.1",
    "patch_dense": "v.patch_embd",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "multimodal_embedder.embedding_projection": "mm.input_projection",
}


def _of_pixels(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor of Gemma 4 12B, whose pixels a file has channel by channel."""
    if name == "pos_embedding":
        return "v.position_embd.weight", tensor.permute(1, 0, 2).contiguous()
    stem, _, end = name.rpartition(".")
    if stem == "patch_ln1" or name == "patch_dense.weight":
        pixels = tensor.unflatten(-1, (-1, 3))  # row by row
        tensor = pixels.transpose(-1, -2).flatten(-2).contiguous()
    return f"{_UNIFIED[stem]}.{end}", tensor


def _stored(name: str, kind: str, depth: int) -> str:
    """The name in a file, by that of published checkpoints where transformers has another now."""
    if kind in ("gemma3", "lfm2_vl"):
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if kind == "gemma4":
        name = f"model.{name}".replace("model.vision_tower.encoder.", "vision_model.model.")
        name = name.replace(".linear.weight", ".weight")
        stem, _, end = name.rpartition(".")
        if end in ("input_min", "input_max", "output_min", "output_max"):
            return f"{known_name(f'{stem}.weight', 'clip', depth).removesuffix('.weight')}.{end}"
        name = f"{name}.weight" if name.endswith("position_embedding_table") else name
    if kind == "internvl":
        for part, number in (("layer_norm", 0), ("linear_1", 1), ("linear_2", 3)):
            name = name.replace(f"multi_modal_projector.{part}", f"mlp1.{number}")
        name = f"{name}.weight" if ".lambda_" in name or "position_embedding" in name else name
        name = f"model.{name}" if name.startswith("vision_tower") else name
    if kind in ("smolvlm", "idefics3"):
        name = f"model.{name}"
    if kind == "paddleocr_vl":
        name = name.replace("visual.", "model.").replace("projector.", "mlp_AR.")
    return known_name(name.replace("_weight", ".weight"), "clip", depth)
