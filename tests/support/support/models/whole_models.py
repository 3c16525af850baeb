"""Tiny models of transformers with a text part, and their makers' own forms of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Under the names of all classes: each class takes those that it knows.
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
_AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_IN_THREE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
_INTERLEAVED: dict[str, Any] = {
    "rope_parameters": _IN_THREE["rope_parameters"] | {"mrope_interleaved": True}
}
_HALF: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Settings of the text part by the whole's model_type; native families read all of them.
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    "gemma4": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "gemma4_unified": {},
    "glm46v": _HALF,
    "glm4v": _HALF,
    "glm4v_moe": _ROUTED | _HALF | {"first_k_dense_replace": 1},
    "glm_ocr": _IN_THREE,
    "idefics2": {},
    "idefics3": {},
    "internvl": {},
    "kimi_k25": _ROUTED | _LATENT,
    "lfm2_vl": {},
    "lfm3_vl": {},
    "llama4": {"num_local_experts": 4, "intermediate_size_mlp": 48},
    "llava": {},
    "llava_next": {},
    "llava_onevision": {},
    "mistral3": {"model_type": "ministral3"},
    "ovis2": {},
    "qianfan_ocr": {},
    "paddleocr_vl": _IN_THREE,
    "qwen2_5_omni_thinker": _IN_THREE,
    "qwen2_5_vl": _IN_THREE,
    "qwen2_vl": _IN_THREE,
    "qwen3_omni_moe_thinker": _EXPERTS | _INTERLEAVED,
    "qwen3_vl": _INTERLEAVED,
    "qwen3_vl_moe": _EXPERTS | _INTERLEAVED,
    "smolvlm": {},
    "step3p7": _ROUTED
    | {
        "share_expert_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", *["sliding_attention"] * 2],
        "num_sliding_attention_heads": 6,
        "sliding_window": 7,
    },
    "voxtral": {},
}
# The same for wholes whose text part transformers' modules run: in a class of its own, or in the
# whole's class, without the other parts.
FALLBACK_WHOLES: dict[str, dict[str, Any]] = {
    "aria": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [24, 24],
        "rope_parameters": _IN_THREE["rope_parameters"] | {"mrope_section": [3, 3, 2]},
    },
    "fuyu": {},
    "minimax_m3_vl": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "muse_glimmer": {},
}


def whole_model(model_type: str, text: dict[str, Any]) -> Any:
    """Build a random model in eval mode, whose every part shows in the logits."""
    import torch
    import transformers
    from support.models.causal_models import MOST_PARAMETERS
    from transformers.models.auto import modeling_auto

    names = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names |= modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    made = transformers.AutoConfig.for_model(model_type).__class__
    parts = {"text": TEXT | text, "vision": _VISION, "audio": _AUDIO}
    sections = {
        key: next((part for name, part in parts.items() if name in key), {})
        for key in made.sub_configs_defaults
    }
    ends = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id")
    config = made(**sections, **dict.fromkeys(ends, 120))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        empty = getattr(transformers, names[model_type])(config)
    assert empty.num_parameters() < MOST_PARAMETERS, f"not small: {config}"
    model = getattr(transformers, names[model_type])(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3, generator=generator)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True, slots=True)
class MakersForm:
    """How makers store the text part of a model with its own code.

    Attributes:
        section: path to its settings, outermost first; empty: at the top level.
        layers: the prefix that replaces `model.` in the names of its tensors.
        head: the head's name.
        whole: further settings of the whole.
        beside: names of other parts' tensors.
        settings: of the text part, instead of the class's own.
    """

    section: tuple[str, ...]
    layers: str
    head: str
    whole: dict[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ("vision.weight",)
    settings: dict[str, Any] = field(default_factory=dict)


_OWN_CODE = {"auto_map": {"AutoModel": "modeling.Whole"}}
# By the name of the causal class that runs the text part, and of the form.
MAKERS_FORMS: dict[str, tuple[str, MakersForm]] = {
    "deepseek_vl2": (
        "llama",
        MakersForm(("language_config",), "language.model.", "language.lm_head"),
    ),
    "exaone4_5": (
        "exaone4",
        MakersForm(
            ("text_config",),
            "model.language_model.",
            "lm_head",
            {"model_type": "exaone4_5"},
            settings={"model_type": "exaone4_5_text"},
        ),
    ),
    "internvl_chat": (
        "qwen3",
        MakersForm(
            ("llm_config",),
            "language_model.model.",
            "language_model.lm_head",
            _OWN_CODE | {"model_type": "internvl_chat", "hidden_size": 999},
            ("vision_model.encoder.weight", "mlp1.0.weight"),
        ),
    ),
    "kimi_k2": (
        "deepseek_v3",
        MakersForm(
            ("text_config",),
            "language_model.model.",
            "language_model.lm_head",
            _OWN_CODE | {"model_type": "kimi_k25", "tie_word_embeddings": False},
            settings={"model_type": "kimi_k2"},
        ),
    ),
    "llava of 2023": (
        "llama",
        MakersForm(
            (), "model.", "lm_head", {"model_type": "llava_llama"}, ("model.mm_projector.0.weight",)
        ),
    ),
    "minicpmv": (
        "qwen2",
        MakersForm(
            (),
            "llm.model.",
            "llm.lm_head",
            _OWN_CODE | {"model_type": "minicpmv", "version": 2.6},
            ("vpm.encoder.weight", "resampler.proj"),
        ),
    ),
    "nemotron vl": (
        "nemotron_h",
        MakersForm(
            ("llm_config",), "language_model.backbone.", "language_model.lm_head", _OWN_CODE
        ),
    ),
    "ovis": ("qwen2", MakersForm(("llm_config",), "llm.model.", "llm.lm_head", _OWN_CODE)),
    "phi3_v": (
        "phi3",
        MakersForm(
            (),
            "model.",
            "lm_head",
            _OWN_CODE | {"model_type": "phi3_v"},
            ("model.vision_embed_tokens.glb_GN",),
        ),
    ),
    "qwen2_5_omni": (
        "qwen2",
        MakersForm(
            ("thinker_config", "text_config"),
            "thinker.model.",
            "thinker.lm_head",
            {"model_type": "qwen2_5_omni", "talker_config": {"hidden_size": 8}},
            ("thinker.visual.weight", "talker.model.layers.0.input_layernorm.weight"),
            {"model_type": "qwen2_5_omni_text"},
        ),
    ),
    "qwen2_5_vl of the hub": (
        "qwen2",
        MakersForm(
            (), "model.", "lm_head", {"model_type": "qwen2_5_vl"}, ("visual.merger.weight",)
        ),
    ),
}
