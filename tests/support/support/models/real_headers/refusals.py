"""Reasons for which a model is rightly refused, by its family or by the form of its weights."""

from __future__ import annotations

import re

from support.models.real_headers.header import Header

_CODE = "code that comes with a checkpoint"
# model_type -> the refusal's text.
FAMILIES: dict[str, str] = {
    # transformers has no class of its own, and a checkpoint's code is never run.
    "falcon_perception": _CODE,
    "molmo": _CODE,
    "nemotron-nas": _CODE,
    "phi4mm": _CODE,
    "None": _CODE,  # MiniCPM 3 without its model_type
    # Families of ours whose class only their makers publish: we do not know the names of their
    # tensors here, so the tried folder lacks them. tests/model/test_makers.py compares them.
    **dict.fromkeys(
        ("baichuan", "chatglm", "internvl_chat", "mimo", "minicpm", "qwen"),
        ".* (is missing|by a name that is known)",
    ),
    # Neither our kernels nor transformers' modules have this arithmetic.
    "deepseek_ref": "recurrent|sparse|DeepseekV4",  # DeepSeek V4 under another name
    "kimi_k3": "situ|hidden_act|linear_attn_config|recurrent",
    "locateanything": "several tokens at once",
    "mllama": "cross attention",
    # transformers has no class, and we know no description.
    "llava_llama": "folders of their own",  # VILA
    "minimax_m3": "model_type 'minimax_m3'",
    # Not a model of the hub, but a converter's settings for another program.
    "ONNX": "ONNX",
}
# Headers whose index states a total_size of its own; it lists the tensors of config.json only.
OTHER_TOTALS = {"SmartMaster35Rus--Llama3-GGuf": 17_671_135_232}  # of Llama 3 8B, 16 GB
FORMS: dict[str, str] = {"MLX": "MLX", "MXFP8": "MXFP8"}


def is_right(header: Header, reason: str) -> bool:
    """Return True if a refusal gives the reason of its family, or of its weights' form."""
    form = header.quantization or {}
    algorithms = {form.get("quant_algo")} | {
        found.get("quant_algo") for found in (form.get("quantized_layers") or {}).values()
    }
    is_mlx = form.get("quant_method") is None and {"bits", "group_size"} <= form.keys()
    named = [FORMS[name] for name in (*algorithms, *(["MLX"] if is_mlx else [])) if name in FORMS]
    family = FAMILIES.get(str(header.config.get("model_type")))
    return any(re.search(wanted, reason) for wanted in (*named, *([family] if family else [])))
