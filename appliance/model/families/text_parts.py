"""Text parts of larger models as data: where their settings lie, and which family reads them.

For text alone a position has one number, so a text part that gives images three (M-RoPE) is its
family's decoder. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.families.reader import class_defaults, text_type

if TYPE_CHECKING:
    from collections.abc import Mapping

# Settings under which a whole model keeps its text part's, the outermost first.
SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")
# `model_type` of text parts of wholes that only code of their makers' describes, and whose settings
# lie beside those of the other parts; by the whole's `version` where it has several.
DEFAULT_TEXTS: dict[str, str | dict[str, str]] = {
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_qwen": "qwen2",
    "minicpmo": {"2.6": "qwen2", "4.5": "qwen3"},
    "minicpmv": {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"},
    "phi3_v": "phi3",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
}
# Whole models whose text is no decoder of their text part's family alone.
REFUSED_WHOLES: dict[str, str] = {
    "diffusion_gemma": "it writes blocks of text by diffusion, not one token after another",
    "gemma4_assistant": "it drafts for a Gemma 4, whose states and keys it reads",
    "gemma4_unified_assistant": "it drafts for a Gemma 4, whose states and keys it reads",
    "jev": "it chooses among options that are given, and writes nothing",
    "locateanything": "it writes several tokens at once, which attend to each other",
    "idefics": "some layers attend to images (cross attention)",
    "mllama": "some layers attend to images (cross attention)",
    "paligemma": "each token of a prompt attends to the whole prompt, not to what is before it",
    "vibevoice": "it speaks, by diffusion, and writes nothing",
}


@dataclass(frozen=True, slots=True)
class TextFamily:
    """The family that reads a text part.

    Attributes:
        model_type: the family's.
        fixed: settings that the text part's class has in its code.
    """

    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


_RENORMALIZED = {"norm_topk_prob": True}
# Text parts that are another family's decoder, by their `model_type`.
FAMILIES_OF_TEXTS: dict[str, TextFamily] = {
    "exaone4_5_text": TextFamily("exaone4"),
    "glm4v_moe_text": TextFamily("glm4_moe"),
    "glm4v_text": TextFamily("glm4", {"attention_bias": True}),
    # Its class ignores the layer after the last, which predicts a further token.
    "glm_ocr_text": TextFamily("glm4", {"attention_bias": False, "num_nextn_predict_layers": 1}),
    "kimi_k2": TextFamily("deepseek_v3"),
    "paddleocr_vl_text": TextFamily("llama", {"attention_bias": False, "mlp_bias": False}),
    "qwen2_5_omni_text": TextFamily("qwen2"),
    "qwen2_5_vl_text": TextFamily("qwen2"),
    "qwen2_vl_text": TextFamily("qwen2"),
    "qwen3_omni_moe_text": TextFamily("qwen3_moe", _RENORMALIZED),
    "qwen3_vl_moe_text": TextFamily("qwen3_moe", _RENORMALIZED),
    "qwen3_vl_text": TextFamily("qwen3"),
}
# Settings of the whole that hold for its text part, too.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


def text_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a larger model's text part; None if the model is text alone.

    Raises:
        UnsupportedModelError: the whole is known, and its text cannot be served alone.
    """
    kind = str(config.get("model_type"))
    if kind in REFUSED_WHOLES:
        raise UnsupportedModelError(
            f"model_type {kind!r} cannot be served: {REFUSED_WHOLES[kind]}; choose a model of"
            " another kind"
        )
    if "llm_cfg" in config:  # VILA
        raise UnsupportedModelError(
            f"a model of model_type {kind!r} keeps its parts in folders of their own; serve its"
            " folder llm, which is that of its text"
        )
    usual, section = _default_text(config), None
    inner = config
    while key := next((key for key in SECTIONS if isinstance(inner.get(key), dict)), None):
        inner = section = inner[key]
    if section is None:
        if usual is None:
            return None
        section = {key: value for key, value in config.items() if key != "model_type"}
    found = section if section.get("model_type") else section | {"model_type": usual}
    kept = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    family = FAMILIES_OF_TEXTS.get(str(found["model_type"]))
    return found | kept | (dict(family.fixed) if family is not None else {})


def family_settings(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return a text part's settings as those of its family, with what absent ones mean."""
    usual = class_defaults(config.get("model_type"))
    if usual is None or config.get("model_type") == model_type:
        return config | {"model_type": model_type}
    values = {key: value for key, value in usual.values.items() if not isinstance(value, dict)}
    return values | usual.by_own_names(config) | {"model_type": model_type}


def _default_text(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of the text part of a whole that does not name it."""
    kind = config.get("model_type")
    found = DEFAULT_TEXTS.get(str(kind), text_type(kind))
    if isinstance(found, dict):
        return found.get(str(config.get("version")))
    return found
