"""Small EAGLE-3 heads and the models that they draft for, and the heads' definition in torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.draft_answers import SIZES
from support.models.draft_heads import write_model
from support.models.expert_models import EXPERTS
from support.models.recurrent_models import RECURRENT
from torch.nn.functional import silu

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": 20}),
    "qwen3_moe": EXPERTS["qwen3_moe"],
    "gpt_oss": EXPERTS["gpt_oss"],
    "deepseek_v3": EXPERTS["deepseek_v3"],
    "qwen3_5": RECURRENT["qwen3_5"],
}
VOCABULARY, SAID, HIDDEN, HEADS, HEAD_DIM = 512, 480, 64, 4, 16
EPS, THETA = 1e-5, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": SAID,
}


def write_with_eagle(target: str, folder: Path) -> Path:
    """Write a model, and a head in a folder of its own; return that folder.

    The head predicts the model's token if its vocabulary has it: it attends to the row itself, and
    subtracts the hidden state, which `fc` scales to the size of a normed one, from the stream.
    """
    model = write_model(*TARGETS[target], folder)
    output = model.get_output_embeddings().weight.detach().float()
    with torch.no_grad():
        seen = model(torch.arange(40)[None], output_hidden_states=True).hidden_states[0]
    return write_eagle(folder, output, float(seen.float().pow(2).mean().sqrt()))


def write_eagle(folder: Path, output: Tensor, size: float = 1.0) -> Path:
    """Write a head into a model's folder; see `tensors_of_head`. Return the head's folder."""
    path = folder / "eagle"
    path.mkdir()
    tensors = tensors_of_head(output, size)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": len(output), "draft_vocab_size": len(tensors["d2t"])}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    return path


def tensors_of_head(output: Tensor, size: float = 1.0) -> dict[str, Tensor]:
    """Return the tensors of a head that guesses well.

    Args:
        output: the model's output matrix, (vocabulary, hidden).
        size: root of the mean square in a stream of the model.
    """
    torch.manual_seed(8)
    own, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)

    def small(rows: int, columns: int, scale: float = 0.005) -> Tensor:
        return scale * torch.randn(rows, columns)

    def norm() -> Tensor:
        return 1 + 0.01 * torch.randn(HIDDEN)

    vocabulary = len(output)
    count = vocabulary * SAID // VOCABULARY
    said = torch.randperm(vocabulary)[:count].sort().values
    return {
        "fc.weight": torch.cat((own, own, own), dim=1) / (3 * size),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": torch.cat((3 * own, nothing), dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat((3 * own, nothing), dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat((own, -own), dim=1),
        "midlayer.self_attn.o_proj.weight": own.clone(),
        "midlayer.mlp.gate_proj.weight": small(96, HIDDEN, 0.1),
        "midlayer.mlp.up_proj.weight": small(96, HIDDEN, 0.1),
        "midlayer.mlp.down_proj.weight": small(HIDDEN, 96),
        "norm.weight": norm(),
        "lm_head.weight": output[said].clone(),
        "d2t": said - torch.arange(count),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, said, True),
    }


def random_tensors(key_heads: int, *, has_bias: bool, has_embedding: bool) -> dict[str, Tensor]:
    """Return a head of random numbers."""
    torch.manual_seed(9)
    found = tensors_of_head(torch.randn(VOCABULARY, HIDDEN))
    for name, tensor in found.items():
        if tensor.is_floating_point():
            spread = 0.3 if tensor.dim() == 1 else 2 / tensor.shape[-1] ** 0.5
            found[name] = (tensor.dim() == 1) + spread * torch.randn(tensor.shape)
    for part in ("k_proj", "v_proj"):
        name = f"midlayer.self_attn.{part}.weight"
        found[name] = found[name][: key_heads * HEAD_DIM].clone()
    for part in ("q_proj", "k_proj", "v_proj", "o_proj") if has_bias else ():
        rows = len(found[f"midlayer.self_attn.{part}.weight"])
        found[f"midlayer.self_attn.{part}.bias"] = torch.randn(rows)
    if has_embedding:
        found["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
    return found


@dataclass(frozen=True)
class PlainEagle:
    """The head's definition, for one sequence.

    Attributes:
        folder: of the head, whose layer is `midlayer.`.
        table: the model's embeddings; the head's own replace them if it has any.
        is_normed: the stream begins as the normed hidden state.
    """

    folder: Path
    table: Tensor
    is_normed: bool = False

    def __call__(
        self, token_ids: Tensor, streams: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stream, hidden states and logits of all rows.

        Args:
            token_ids: (rows,).
            streams: (rows of known tokens, 3 * hidden).
            own: (rows of drafts, hidden), the head's streams.
        """
        weights = load_file(self.folder / "model.safetensors")
        table = weights.get("embed_tokens.weight", self.table)

        def linear(x: Tensor, part: str) -> Tensor:
            found = x @ weights[f"midlayer.{part}.weight"].T
            return found + weights.get(f"midlayer.{part}.bias", torch.zeros(()))

        def normed(x: Tensor, name: str) -> Tensor:
            scale = weights[f"{name}.weight"]
            return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * scale

        def heads(x: Tensor) -> Tensor:
            split = x.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            repeated: Tensor = split.repeat_interleave(HEADS // len(split), dim=0)
            return repeated

        def turned(x: Tensor) -> Tensor:
            half = HEAD_DIM // 2
            angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
            first, second = x[..., :half], x[..., half:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        given = torch.cat((streams @ weights["fc.weight"].T, own))
        hidden = normed(given, "midlayer.hidden_norm")
        both = torch.cat((normed(table[token_ids], "midlayer.input_layernorm"), hidden), dim=-1)
        query, key, value = (
            heads(linear(both, f"self_attn.{part}")) for part in ("q_proj", "k_proj", "v_proj")
        )
        scores = turned(query) @ turned(key).transpose(1, 2) / HEAD_DIM**0.5
        rows = len(token_ids)
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(dim=-1) @ value).transpose(0, 1).flatten(1)
        stream = (hidden if self.is_normed else given) + linear(mixed, "self_attn.o_proj")
        inner = normed(stream, "midlayer.post_attention_layernorm")
        inner = silu(linear(inner, "mlp.gate_proj")) * linear(inner, "mlp.up_proj")
        stream = stream + linear(inner, "mlp.down_proj")
        hidden = normed(stream, "norm")
        return stream, hidden, hidden @ weights["lm_head.weight"].T


def target_sizes(layers: int) -> dict[str, Any]:
    """Settings of a model with so many layers, whose hidden states such heads read."""
    return {**SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": layers}
