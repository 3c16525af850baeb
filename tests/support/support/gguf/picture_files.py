"""GGUF files of small models that read pictures: the text's, and the projector's beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.gguf.gguf_conversions import architecture_of, gguf_settings, gguf_tensors
from support.gguf.gguf_files import write_gguf_file
from support.gguf.gguf_models import write_gguf
from support.gguf.projector_files import write_projector
from support.gguf.recurrent_files import write_gguf as write_recurrent

if TYPE_CHECKING:
    from pathlib import Path

_TEXTS = ("model.language_model.", "model.text_model.")
_RECURRENT = {"lfm2": "lfm2", "qwen3_5_text": "qwen35"}


def write_picture_files(
    folder: Path, model: Any, processor: dict[str, Any], **changes: Any
) -> Path:
    """Write `model.gguf` and `mmproj-F32.gguf` of a transformers model; return the text's.

    Args:
        processor: as for `write_projector`, like `changes`.
    """
    write_projector(folder / "mmproj-F32.gguf", model, processor, **changes)
    text, path = text_of(model), folder / "model.gguf"
    kind = text.config.model_type
    if kind in _RECURRENT:
        is_turned = kind != "lfm2"
        more: dict[str, Any] = {"rope.dimension_sections": _sections(model)} if is_turned else {}
        return write_recurrent(folder, text, _RECURRENT[kind], **more)
    if kind == "gemma3_text":
        config = text.config
        rope = config.rope_parameters
        settings = {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in config.layer_types
            ],
            "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        }
        return write_gguf(path, text, "gemma3", settings)
    settings = gguf_settings(text.config)
    label = architecture_of(text.config)
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        label = "qwen2vl"
        settings |= {"rope.dimension_sections": _sections(model)}
    if model.config.model_type == "glm4v_moe":
        label = "glm4moe"
        settings |= {"rope.dimension_sections": _sections(model)}
    if model.config.model_type == "paddleocr_vl":
        label = "paddleocr"
        settings |= {"rope.dimension_sections": _sections(model)}
    if model.config.model_type == "qwen3_vl":
        label = "qwen3vl"
        taps = model.config.vision_config.deepstack_visual_indexes
        settings |= {"rope.dimension_sections": _sections(model), "n_deepstack_layers": len(taps)}
    tensors = gguf_tensors(dict(text.state_dict()), text.config)
    if label == "glm4moe":  # whose table is another's
        norms = ("ffn_norm", "post_attention_norm")
        tensors = {name.replace(*norms): tensor for name, tensor in tensors.items()}
    return write_gguf_file(path, label, settings, tensors)


def text_of(model: Any) -> Any:
    """The text of a model as a class of its own, whose tensors the converter knows."""
    import transformers

    config = model.config.get_text_config()
    # The class of a text alone is another one's.
    if config.model_type == "qwen3_vl_text":
        config = transformers.Qwen3Config(**{**config.to_dict(), "model_type": "qwen3"})
    if config.model_type == "gemma4_unified_text":
        config = transformers.Gemma4TextConfig(
            **{**config.to_dict(), "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
        )
    if config.model_type == "glm4v_moe_text":
        config = transformers.Glm4MoeConfig(**{**config.to_dict(), "model_type": "glm4_moe"})
    if config.model_type == "paddleocr_vl_text":
        config = transformers.Ernie4_5Config(**{**config.to_dict(), "model_type": "ernie4_5"})
    if config.model_type in ("qwen2_vl_text", "qwen2_5_vl_text"):
        config = transformers.Qwen2Config(**{**config.to_dict(), "model_type": "qwen2"})
    text = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {"lm_head.weight": model.lm_head.weight}
    for name, tensor in model.state_dict().items():
        for prefix in _TEXTS:
            if name.startswith(prefix):
                state[f"model.{name.removeprefix(prefix)}"] = tensor
    text.load_state_dict(state)
    return text


def _sections(model: Any) -> list[int]:
    rope = model.config.get_text_config().rope_parameters
    return [*rope["mrope_section"], 0]
