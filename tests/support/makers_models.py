"""Models whose class only their makers publish, each made of a class of transformers.

The arithmetic of such a model is that of its relative in transformers; the published code says
under which names it holds the same tensors and settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Maker:
    """What a maker's folder has instead of its relative's.

    Attributes:
        relative: the class's `model_type` in transformers.
        settings: of that class.
        config: settings that the folder adds to the sizes that both name alike.
        renamed: names that the maker gives to modules, by the relative's; the first that fits.
        joined: turns the tensors of a layer that the maker stores together.
        unnamed: settings of the relative that the folder names otherwise, or not at all.
    """

    relative: str
    settings: dict[str, Any]
    config: dict[str, Any]
    renamed: dict[str, str] = field(default_factory=dict)
    joined: Callable[[dict[str, Tensor]], Parts] | None = None
    unnamed: tuple[str, ...] = ()


def _by_key_head(state: dict[str, Tensor]) -> Parts:
    """InternLM 2: a key head's queries, its key and its value are neighbours."""
    for name in list(state):
        if name.endswith("self_attn.q_proj.weight"):
            parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            groups = [part.unflatten(0, (2, -1)) for part in parts]
            yield (
                name.replace("self_attn.q_proj", "attention.wqkv"),
                torch.cat(groups, dim=1).flatten(0, 1),
            )


_MINICPM = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 30,
}
# Granite's factors of the same model: 3 layers of width 60, whose heads are 10 wide.
_AS_MINICPM = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 10**-0.5,
    "tie_word_embeddings": False,
}
_OF_GRANITE = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

MAKERS: dict[str, Maker] = {
    "internlm2": Maker(
        "llama",
        {},
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
        {
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        _by_key_head,
    ),
    "minicpm": Maker(
        "granite",
        _AS_MINICPM,
        _MINICPM,
        unnamed=(*_OF_GRANITE, "attention_multiplier"),
    ),
    # As MiniCPM 1, whose config.json leaves out what its class has by itself.
    "minicpm-tied": Maker(
        "granite",
        _AS_MINICPM | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        _MINICPM | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        unnamed=(
            *(*_OF_GRANITE, "attention_multiplier", "tie_word_embeddings", "rms_norm_eps"),
            *("hidden_act", "attention_bias", "rope_parameters", "mlp_bias"),
        ),
    ),
}


def save_as_maker(case: str, model: Any, folder: Path) -> Path:
    """Write the model of a case as its maker would, from that of its relative."""
    maker = MAKERS[case]
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    made = {} if maker.joined is None else dict(maker.joined(state))
    for name, tensor in state.items():
        parts = (name.replace(old, own) for old, own in maker.renamed.items() if old in name)
        made[next(parts, name)] = tensor
    made = {name: tensor.contiguous().clone() for name, tensor in made.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in maker.unnamed}
    (folder / "config.json").write_text(json.dumps(config | maker.config))
    return folder
