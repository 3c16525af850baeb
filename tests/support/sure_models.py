"""Random models of transformers that are surer of their tokens than rounding can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from causal_models import random_model


def write_sure_model(model_type: str, folder: Path, **settings: Any) -> Any:
    """Write a model to a folder, and return it for generating from."""
    torch.manual_seed(3)
    model = random_model(model_type, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    # an end of text and padding are tokens like others
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    return model
