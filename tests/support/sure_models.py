"""Random models of transformers that are surer of their tokens than rounding can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_sure_model(model_type: str, folder: Path, **settings: Any) -> Any:
    """Write a model to a folder, and return it for generating from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    # an end of text and padding are tokens like others
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    return model
