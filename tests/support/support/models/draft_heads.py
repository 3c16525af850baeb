"""Small checkpoints with a head for drafting, whose guesses are mostly the model's tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.draft_answers import SIZES
from support.models.causal_models import random_model
from support.models.expert_models import EXPERTS
from support.models.recurrent_models import RECURRENT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# transformers' settings, the checkpoint's, and the model's layers that the head's resemble.
FAMILIES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], tuple[int, ...]]] = {
    "glm4_moe": (EXPERTS["glm4_moe"], {"num_nextn_predict_layers": 1}, (2,)),
    "deepseek_v3": (EXPERTS["deepseek_v3"], {"num_nextn_predict_layers": 1}, (2,)),
    "glm4_moe_lite": (EXPERTS["glm4_moe_lite"], {"num_nextn_predict_layers": 1}, (2,)),
    "qwen3_5": (RECURRENT["qwen3_5"], {"mtp_num_hidden_layers": 1}, (1,)),
    "nemotron_h": (
        RECURRENT["nemotron_h"],
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        (3, 1),
    ),
}
LATENT = ("deepseek_v3", "glm4_moe_lite")
_BEHIND_THE_LAST = ("glm4_moe", *LATENT)
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def write_with_head(family: str, folder: Path) -> Any:
    """Write a model and its head; return the model."""
    (model_type, settings), _, _ = FAMILIES[family]
    model = write_model(model_type, settings, folder)
    _add_head(family, folder)
    return model


def write_model(model_type: str, settings: dict[str, Any], folder: Path) -> Any:
    """Write a model and return it.

    A layer adds little to the stream, so that a token decides what follows it.
    """
    torch.manual_seed(5)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 512}
    if "layers_block_type" in settings:
        sizes.pop("num_hidden_layers")
    model = random_model(model_type, **sizes | settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("lm_head"):
                parameter.mul_(20)
            elif parameter.dim() > 1:
                parameter.mul_(0.05 if name.endswith(_OUTPUTS) else 6)
            elif "gemma" in model_type and "layernorm" in name and "post_" in name:
                parameter.fill_(-0.95)  # 1 is added
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    return model


def join_names(family: str) -> tuple[str, str, str, str]:
    """Full names of both norms, of the linear and of the last norm."""
    if family == "qwen3_5":
        return "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
    first, last = ("mtp.layers.0.", "mtp.layers.1.final_layernorm")
    if family != "nemotron_h":
        first, last = "model.layers.3.", "model.layers.3.shared_head.norm"
    return f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", last


def _add_head(family: str, folder: Path) -> None:
    _, config, like = FAMILIES[family]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    is_behind = family in _BEHIND_THE_LAST
    base, begin = ("model.layers.", 3) if is_behind else ("mtp.layers.", 0)
    for place, index in enumerate(like):
        inside = f".layers.{index}."  # after `model` or `backbone`
        for name in [one for one in tensors if inside in one and not one.startswith("mtp")]:
            part = name.partition(inside)[2]
            tensors[f"{base}{begin + place}.{part}"] = tensors[name].clone()
    hidden = SIZES["hidden_size"]
    token_norm, hidden_norm, linear, last = join_names(family)
    middle = 0.0 if family == "qwen3_5" else 1.0  # Qwen 3.5 adds 1 to norms
    for name in (token_norm, hidden_norm, last):
        tensors[f"{name}.weight"] = middle + 0.01 * torch.randn(hidden)
    tensors[f"{linear}.weight"] = torch.cat(
        (0.12 * torch.eye(hidden), 0.0005 * torch.randn(hidden, hidden)), dim=1
    )
    save_file(tensors, path, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


class PlainHead:
    """The head's definition: both halves normed and joined, layers of transformers, a norm."""

    def __init__(self, family: str, model: Any, folder: Path) -> None:
        _, _, like = FAMILIES[family]
        tensors = load_file(folder / "model.safetensors")
        names = join_names(family)
        self._token, self._hidden, self._join, last = (
            tensors[f"{name}.weight"].float() for name in names
        )
        self._shift = 1.0 if family == "qwen3_5" else 0.0
        self._model = deepcopy(model).float().eval()
        self.table = self._model.get_input_embeddings().weight
        inner = self._model.model
        inner.layers = torch.nn.ModuleList([inner.layers[index] for index in like])
        norm = inner.norm_f if hasattr(inner, "norm_f") else inner.norm
        norm.weight.data.copy_(last)
        inner.config.num_hidden_layers = len(like)
        for setting in ("layer_types", "layers_block_type"):
            kinds = getattr(inner.config, setting, None)
            if kinds is not None and len(kinds) > len(like):
                setattr(inner.config, setting, [kinds[index] for index in like])
        self._stream: Tensor | None = None
        norm.register_forward_pre_hook(self._see)

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stream, hidden states and logits of all rows of one sequence."""
        eps = 1e-5
        for key in ("rms_norm_eps", "layer_norm_epsilon"):
            eps = getattr(self._model.config, key, eps)

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + self._shift)

        halves = normed(self.table[token_ids], self._token), normed(given, self._hidden)
        joined = torch.cat(halves, dim=-1) @ self._join.T
        hidden = self._model.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        assert self._stream is not None
        return self._stream[0], hidden, self._model.lm_head(hidden)

    def _see(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._stream = inputs[0]
