"""transformers' model of a header: its tensors under their names on a hub, and its logits."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from support.models.real_headers.sizes import TEXT_SECTIONS, TOWER, VOCABULARY, text_section
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_PARAMETERS = 2**26
_NOT_THEIRS = (
    "quantization_config", "compression_config", "auto_map",
    "_attn_implementation", "attn_implementation", "_flash_attn_2_enabled",
)  # fmt: skip

# Models whose parts are models: section, class and prefix of the part that generates text.
_TEXT_PARTS = {
    "deepseek_vl_v2": ("language_config", "DeepseekV2ForCausalLM", "language."),
    "gemma3n": ("text_config", "Gemma3nForCausalLM", "model.language_model."),
    "internvl_chat": ("llm_config", "", "language_model."),
    "kimi_k25": ("text_config", "DeepseekV3ForCausalLM", "language_model."),
    "kimi_vl": ("text_config", "DeepseekV3ForCausalLM", "language_model."),
    "locateanything": ("text_config", "Qwen2ForCausalLM", "language_model."),
    "ovis": ("llm_config", "", "llm."),
    "ovis2_5": ("llm_config", "", "llm."),
    "qwen2_5_omni": ("thinker_config", "Qwen2_5OmniThinkerForConditionalGeneration", "thinker."),
    "qwen3_omni_moe": ("thinker_config", "Qwen3OmniMoeThinkerForConditionalGeneration", "thinker."),
}
# The language models of MiniCPM-V, whose settings lie beside those of the tower.
_MINICPMV = {"2.5": "Llama", "2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}


class NoClassError(Exception):
    """transformers has no class for a config, or its class refuses it."""


class TooLargeError(Exception):
    """A size that was not cut keeps the model as large as a real one."""


def part_of(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the config of the part that generates text, and the prefix of its tensors."""
    model_type = str(config.get("model_type"))
    if model_type == "minicpmv" and str(config.get("version")) in _MINICPMV:
        kind = _MINICPMV[str(config["version"])]
        plain = {key: value for key, value in config.items() if not isinstance(value, dict)}
        plain |= {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
        return plain | {"rope_scaling": config.get("rope_scaling")}, "llm."
    if model_type not in _TEXT_PARTS:
        return config, ""
    section, name, prefix = _TEXT_PARTS[model_type]
    return {**config[section], **({"architectures": [name]} if name else {})}, prefix


def placed(prefix: str, name: str) -> str:
    """Return the name of a text part's tensor in the file of the whole model."""
    return prefix + (name.removeprefix("model.") if prefix.startswith("model.") else name)


def class_of(config: dict[str, Any]) -> Any:
    """Return transformers' class of a config's architecture, or of its model_type.

    Raises:
        NoClassError: there is none, except in the checkpoint's own code.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = config.get("model_type")
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        found_in = table.get(model_type) if model_type in CONFIG_MAPPING else None
        names += [found_in] if isinstance(found_in, str) else []
    for name in names:
        found: Any = getattr(transformers, name, None)
        if not hasattr(found, "save_pretrained"):
            continue
        # A maker's own model_type for a model whose class has another name.
        is_own_type = model_type not in CONFIG_MAPPING
        if is_own_type or found.config_class is CONFIG_MAPPING[model_type]:
            return found
        # A text part with another type's class has settings of its own: InternLM 3 is a Llama.
        is_its_own = name == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        if is_its_own and not CONFIG_MAPPING[model_type].sub_configs:
            return found
    raise NoClassError(f"model_type {model_type!r}, architectures {config.get('architectures')}")


def config_of(config: dict[str, Any], folder: Path) -> Any:
    """Read a config as transformers reads it from a folder's file."""
    import transformers

    plain = {key: value for key, value in config.items() if key not in _NOT_THEIRS}
    if isinstance(plain.get("text_config"), dict):
        text = plain["text_config"].items()
        plain["text_config"] = {key: value for key, value in text if key not in _NOT_THEIRS}
    plain["model_type"] = class_of(config).config_class.model_type
    length = "original_max_position_embeddings"
    if length in plain and plain.get("rope_scaling"):  # moved to where the class looks for it
        plain["rope_scaling"] = {length: plain[length], **plain["rope_scaling"]}
    rope = plain.get("rope_scaling") or {}
    if multiple := rope.get("attn_factor"):  # as vLLM reads it; the class ignores the key
        usual = 0.1 * math.log(rope["factor"]) + 1
        plain["rope_scaling"] = {**rope, "attention_factor": multiple * usual}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plain))
    found = transformers.AutoConfig.from_pretrained(folder)
    text = found.get_text_config()
    if text is not found and _is_unread(text, text_section(config)):
        # From an old flat config this class reads only the defaults of its sections.
        plain = {**plain, "text_config": {**plain, "model_type": text.model_type}}
        (folder / "config.json").write_text(json.dumps(plain))
        found = transformers.AutoConfig.from_pretrained(folder)
    return found


def _is_unread(text: Any, given: dict[str, Any]) -> bool:
    """Return True if a text part has its class's defaults instead of the config's values."""
    share = given.get("partial_rotary_factor")
    rope = getattr(text, "rope_parameters", None) or {}
    keys = ("hidden_size", "num_hidden_layers", "vocab_size")
    has_other_size = any(key in given and getattr(text, key, 0) != given[key] for key in keys)
    return has_other_size or (share is not None and rope.get("partial_rotary_factor") != share)


def with_towers(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write into a config the sizes that its towers leave to their classes, to be cut as well.

    Raises:
        NoClassError: see `class_of`.
    """
    part, _ = part_of(config)
    found = config_of(part, folder)
    text = found.get_text_config()
    towers: dict[str, Any] = {
        name: getattr(found, name, None)
        for name in type(found).sub_configs
        if getattr(found, name, None) not in (None, text)
    }
    filled = {
        name: {
            **{key: value for key, value in tower.to_dict().items() if key in TOWER},
            **(part.get(name) or {}),
        }
        for name, tower in towers.items()
        if name not in TEXT_SECTIONS
    }
    if isinstance(text.pad_token_id, int) and text.pad_token_id >= VOCABULARY:
        filled["pad_token_id"] = text_section(part).get("pad_token_id", 0)
    if part is config:
        return {**config, **filled}
    section = _TEXT_PARTS.get(str(config["model_type"]), ("",))[0]
    return {**config, section: {**config[section], **filled}} if section else dict(config)


def with_sizes(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write into a config the sizes of its text part that its class has and it lacks."""
    text = config_of(config, folder).get_text_config()
    missing = {
        key: getattr(text, key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
                    "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        if hasattr(text, key) and key not in text_section(config)
    }  # fmt: skip
    place = next((key for key in TEXT_SECTIONS if isinstance(config.get(key), dict)), None)
    return {**config, place: {**config[place], **missing}} if place else {**config, **missing}


def without_content(config: dict[str, Any], folder: Path) -> Any:
    """Build transformers' model of a config on the meta device.

    Raises:
        NoClassError: see `class_of`.
    """
    made = class_of(config)
    settings = config_of(config, folder)
    try:
        with torch.device("meta"):
            return made(settings).eval()
    except Exception as error:
        raise NoClassError(f"{made.__name__}: {type(error).__name__} {error}") from error


def with_content(config: dict[str, Any], folder: Path) -> Any:
    """Build transformers' model of a config in float32, with random weights.

    Raises:
        NoClassError: see `class_of`.
        TooLargeError: the model is not small.
    """
    model = without_content(config, folder)
    if model.num_parameters() > MOST_PARAMETERS:
        largest = max(model.named_parameters(), key=lambda item: item[1].numel())
        raise TooLargeError(f"{largest[0]} of {tuple(largest[1].shape)}")
    with torch.device("cpu"), _default_dtype(torch.float32), torch.random.fork_rng():
        torch.manual_seed(3)  # `_fill` keeps some of what is drawn here
        model = type(model)(model.config).eval()
    _fill(model)
    return model


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors under the names that a hub has."""
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in state.items() if name not in tied}
    return dict(revert_weight_conversion(model, state))


def num_of_text(model: Any) -> int:
    """Count the weights of the part of a model that generates text."""
    parts = [model.get_decoder(), model.get_output_embeddings()]
    found = {id(each): each for part in parts if part is not None for each in part.parameters()}
    return sum(each.numel() for each in found.values())


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """Return the saved model's logits (num_tokens, vocab_size), read by transformers in float32."""
    import transformers

    made = class_of(json.loads((folder / "config.json").read_text()))
    settings = transformers.AutoConfig.from_pretrained(folder)
    extra = {}
    text = settings.get_text_config()
    if (cap := getattr(text, "attn_logit_softcapping", None)) is not None:
        extra["softcap"] = cap
    model, about = made.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if about["missing_keys"]:
        raise AssertionError(f"transformers misses {sorted(about['missing_keys'])[:3]}")
    for module in model.modules():
        if hasattr(module, "time_step_limit") and hasattr(settings, "time_step_limit"):
            # Nemotron-H's class clamps to another lower bound in prompts than in answers; its
            # maker's own code has this one in both.
            low, high = settings.time_step_limit
            module.time_step_limit = (low, min(high, torch.finfo(torch.float32).max))
    # Llama 4's image class runs only with images.
    run = model.language_model if settings.model_type == "llama4" else model
    with torch.inference_mode():
        logits: Tensor = run.eval()(torch.tensor([token_ids]), **extra).logits[0]
    if settings.model_type in (
        "aya_vision",
        "cohere2_vision",
    ):  # the class lacks a setting that the text's class has
        logits = logits * text.logit_scale
    return logits.float()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fill(model: Any) -> None:
    """Draw weights so large that every part shows; keep initial values that matter."""
    random = torch.Generator().manual_seed(1)
    buffers = [
        item
        for item in model.named_buffers()
        if item[0].endswith(("correction_bias", "layer_scalar"))
    ]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *buffers]:
            if not tensor.is_floating_point():
                continue
            spread = torch.randn(tensor.shape, generator=random)
            if tensor.dim() >= 2 and not name.endswith((".conv1d.weight", "conv.weight")):
                tensor.copy_(spread * 1.5 * tensor.shape[-1] ** -0.5)
            elif tensor.dim() >= 2:
                tensor.copy_(0.5 * spread)
            else:
                start = torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0).clamp(-4, 4)
                tensor.copy_(start + 0.3 * spread)
