"""Random language models of transformers, also of classes that it does not find by their config."""

from __future__ import annotations

from typing import Any


def random_model(model_type: str, attention: str | None = None, **settings: Any) -> Any:
    """A model in the mode for answers."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    if attention is not None:
        config._attn_implementation = attention
    if model_type == "mistral4":
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        return Mistral4ForCausalLM(config).eval()
    return transformers.AutoModelForCausalLM.from_config(config).eval()
