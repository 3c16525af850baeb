"""Random models of transformers that are surer of their tokens than rounding can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.models.causal_models import random_model

# For ranks: three groups of heads, so that shares of 2:1 divide them.
THREE_GROUPS = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TWO_LAYERS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


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
