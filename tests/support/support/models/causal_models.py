"""Random language models of transformers, also of classes that it does not find by their config."""

from __future__ import annotations

from typing import Any

MOST_PARAMETERS = 2**26  # a size that is left out is as large as in a real model


def random_model(model_type: str, attention: str | None = None, **settings: Any) -> Any:
    """A small model in the mode for answers."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    if attention is not None:
        config._attn_implementation = attention
    if model_type == "mistral4":
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        made = Mistral4ForCausalLM
    elif model_type == "step3p5":  # transformers has the text as a part alone
        config = _whole_step(config)
        made = transformers.Step3p7ForConditionalGeneration
    else:
        made = transformers.AutoModelForCausalLM.from_config
    model = made(config).eval()
    assert model.num_parameters() < MOST_PARAMETERS, f"not small: {config}"
    return model


def _whole_step(text: Any) -> Any:
    """Settings of a whole with the smallest vision."""
    import transformers

    vision = {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "mlp_ratio": 1.0}
    whole = transformers.Step3p7Config(text_config=text, vision_config=vision)
    whole._attn_implementation = text._attn_implementation
    return whole


def spread_weights(model: Any) -> None:
    """Draw weights so large that every part shows in the logits."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(std=0.3)
