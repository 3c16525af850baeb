"""GGUF files of models with a head that drafts, as llama.cpp's converter writes them.

The head's layer is a block behind the model's, which holds what joins its inputs, too.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gguf
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from support.gguf.gguf_conversions import gguf_settings, gguf_tensors
from support.gguf.gguf_files import write_gguf_file
from support.gguf.recurrent_files import converted, metadata, stored_name
from support.models.draft_heads import join_names, write_with_head

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ARCHITECTURES = {
    "qwen3_5": "qwen35",
    "glm4_moe": "glm4moe",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
_STORED = (
    gguf.MODEL_TENSOR.NEXTN_ENORM,
    gguf.MODEL_TENSOR.NEXTN_HNORM,
    gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write_file_with_head(family: str, folder: Path) -> Any:
    """Write a model with its head to `model.gguf`, and as a checkpoint to `original`.

    Returns:
        The model.
    """
    model = write_with_head(family, folder / "original")
    tensors = load_file(folder / "original" / "model.safetensors")
    architecture, count = ARCHITECTURES[family], model.config.num_hidden_layers
    stored = {
        f"{name}.weight": f"{gguf.TENSOR_NAMES[kind].format(bid=count)}.weight"
        for name, kind in zip(join_names(family), _STORED, strict=True)
    }
    joins = {stored[name]: tensors.pop(name) for name in stored}
    config = deepcopy(model.config)
    config.num_hidden_layers = count + 1
    if family == "qwen3_5":
        joins = {n: t + 1 if t.dim() == 1 else t for n, t in joins.items()}  # as all norms but one
        tensors = {
            name.replace("mtp.layers.0.", f"model.layers.{count}."): tensor
            for name, tensor in tensors.items()
        }
        found = {
            stored_name(name, architecture, count + 1): converted(name, tensor, config)
            for name, tensor in tensors.items()
        }
        width = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
        settings = {"feed_forward_length": width} | metadata(config)
    else:
        found = gguf_tensors(_stacked(tensors), config, architecture)
        settings = gguf_settings(config)
    settings |= {"nextn_predict_layers": 1}
    write_gguf_file(folder / "model.gguf", architecture, settings, found | joins)
    return model


def write_apart(whole: Path, model: Path, head: Path) -> None:
    """Cut a model in two, as the converter does with `--no-mtp` and `--mtp`."""
    read = GGUFReader(whole)
    architecture = read.fields["general.architecture"].contents()
    blocks = read.fields[f"{architecture}.block_count"].contents()
    behind = f"blk.{blocks - 1}."
    shared = ("token_embd.weight", "output.weight", "output_norm.weight")
    for path in (model, head):
        writer: Any = GGUFWriter(path, architecture)
        for key, field in read.fields.items():
            value = field.contents()
            if path == model and key.endswith("nextn_predict_layers"):
                continue
            if path == model and key == f"{architecture}.block_count":
                value -= 1
            if not key.startswith("GGUF.") and key != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, value, field.types[0], sub_type=inner)
        for tensor in read.tensors:
            is_of_head = tensor.name.startswith(behind)
            if tensor.name in shared or is_of_head == (path == head):
                writer.add_tensor(tensor.name, tensor.data.astype("float32"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of experts, one after another by their numbers."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
        else:
            found[name] = tensor
    for name, each in stacks.items():
        found[name] = torch.stack([each[number] for number in sorted(each)])
    return found
