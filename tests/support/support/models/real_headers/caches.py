"""What a model keeps of a sequence: counts the cache of transformers' class, without content."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from support.models.real_headers.sizes import text_section


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers kept of one sequence, all layers.

    Attributes:
        of_token: keys and values, or latents.
        of_sequence: recurrent states, whose size does not depend on the length.
    """

    of_token: int
    of_sequence: int


def kept(model: Any, config: dict[str, Any]) -> Kept:
    """Run one token through a model on the meta device, and count what its cache holds.

    Args:
        model: of transformers, of real size.
        config: of its maker.
    """
    layers = _cache_after(model, 1).layers
    held = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    of_token = sum(_keys_and_values(layer, text_section(config)) for layer in held)
    return Kept(of_token, sum(map(_state, layers)))


def kept_in_all(model: Any, num_tokens: int) -> int:
    """Count the numbers in any cache that a class keeps of a sequence on the meta device."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    left: list[Any] = [_cache_after(model, num_tokens)]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif id(value) not in seen:
            seen.add(id(value))
            inside = vars(value) if hasattr(value, "__dict__") else value
            if isinstance(inside, dict):
                left += inside.values()
            elif isinstance(inside, list | tuple):
                left += inside
    return sum(tensor.numel() for tensor in found.values())


def _cache_after(model: Any, num_tokens: int) -> Any:
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):  # their routers choose by content
            module.forward = lambda hidden, *chosen, **weights: hidden
    # Llama 4's image class runs only with images.
    run = model.language_model if model.config.model_type == "llama4" else model
    # The class looks at the content to tell whether a row holds several sequences; here it is one.
    one = patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    with torch.inference_mode(), one:
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        output = run(input_ids=tokens, use_cache=True)
    names = ("past_key_values", "cache_params", "state")
    return next(getattr(output, name) for name in names if getattr(output, name, None) is not None)


def _keys_and_values(layer: Any, text: dict[str, Any]) -> int:
    keys, values = int(layer.keys.numel()), int(layer.values.numel())
    if text.get("kv_lora_rank"):
        return keys + values  # latents, and the rotated part of keys
    # Falcon's class stores the heads of grouped queries repeated.
    repeats: int = layer.keys.shape[1] // text["num_kv_heads"] if text.get("num_kv_heads") else 1
    return 2 * max(keys, values) // repeats  # a page has one width for keys and values


def _state(layer: Any) -> int:
    """Count what the next token needs; the classes keep one more input per filter."""
    filters = [state for state in getattr(layer, "conv_states", {}).values() if state is not None]
    maps = [state for state in getattr(layer, "recurrent_states", {}).values() if state is not None]
    inputs = sum(math.prod(state.shape[1:-1]) * (state.shape[-1] - 1) for state in filters)
    return int(inputs + sum(state.numel() for state in maps))
