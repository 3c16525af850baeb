"""A GGUF file as transformers reads it: the oracle of what its weights are, and of its logits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch


def load_with_transformers(path: Path) -> Any:
    """Its model, in float32.

    It would read all metadata, so the vocabulary, twice, and make its table of names once for each
    module of the model, which together take most of the time.
    """
    from transformers import AutoModelForCausalLM

    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
