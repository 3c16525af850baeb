"""Random adapters in PEFT's format, written by PEFT itself, and models that have them merged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def with_adapter(model: Any, *, seed: int = 3, spread: float = 0.05, **settings: Any) -> Any:
    """Put a random adapter on a transformers model; B is not zero, as it is before training."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 6, "target_modules": ALL, **settings}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return adapted.eval()


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 3,
    spread: float = 0.05,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> Path:
    """Write a folder without PEFT.

    Args:
        folder: is made.
        shapes: (out_features, in_features) by the name of the linear.
        change: is given settings and tensors to spoil them.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name, (outputs, inputs) in shapes.items():
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            factor = spread * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = factor.to(dtype)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(shapes),
    }
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
