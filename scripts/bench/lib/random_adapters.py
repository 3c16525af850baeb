"""Write adapters of random factors in PEFT's format, each with content of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from appliance.engine.request import AdapterRef
from appliance.files import stamp_of
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> list[AdapterRef]:
    """Write adapters that change every linear that they may.

    Args:
        folder: gets a folder for each.
        model: the folder or file that they are for.
        count: how many.
        rank: of every linear.
    """
    source = open_model(model)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, target in adapter_targets(source.spec, source.family.names).items():
        outputs, inputs = target.slot.shape
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            factor = 0.01 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = factor.bfloat16()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    refs = []
    for number in range(count):
        path = folder / f"adapter-{number}"
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {key: one.roll(number).contiguous() for key, one in tensors.items()},
            path / "adapter_model.safetensors",
        )
        refs.append(AdapterRef(path.name, str(path), stamp_of(path)))
    return refs
