"""A GGUF file as transformers reads it: the oracle of what its weights are, and of its logits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy
import torch


def load_with_transformers(path: Path) -> Any:
    """Its model, in float32.

    It would read all metadata, so the vocabulary, twice and through slices of a memory map, and
    make its table of names once for each module of the model: most of the time goes there.
    """
    from transformers import AutoModelForCausalLM

    with (
        patch("numpy.memmap", _read),
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )


def _read(path: Path, **_: object) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """As an array of no class of its own, whose slices cost a tenth."""
    return numpy.fromfile(path, numpy.uint8)
