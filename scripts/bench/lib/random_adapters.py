"""Write adapters of random factors, each with content of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from support.gguf.gguf_models import gguf_factors, write_gguf_adapter

from appliance.engine.nouns.request import AdapterRef
from appliance.files import stamp_of
from appliance.model.adapters.adapter import LowRank
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> list[AdapterRef]:
    """Write adapters in PEFT's format that change every linear that they may.

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


def write_gguf_adapters(folder: Path, model: Path, adapters: Sequence[AdapterRef]) -> list[Path]:
    """Write adapters of PEFT's format in llama.cpp's.

    Args:
        folder: gets a file for each.
        model: the GGUF file that they are for.
        adapters: as `write_adapters` returned them.
    """
    folder.mkdir()
    source = open_model(model)
    paths = []
    for one in adapters:
        stored = load_file(Path(one.path) / "adapter_model.safetensors")
        parts = {
            name: LowRank(
                stored[f"base_model.model.{name}.lora_A.weight"].float(),
                stored[f"base_model.model.{name}.lora_B.weight"].float(),
                scale=1.0,
            )
            for name in adapter_targets(source.spec, source.family.names)
        }
        rank = next(iter(parts.values())).rank
        factors = gguf_factors(source, parts)
        paths.append(write_gguf_adapter(folder / f"{one.name}.gguf", factors, alpha=float(rank)))
    return paths
