"""Nomic's encoder with experts, folder and GGUF file.

transformers has no class for it. The oracle is its class of the same encoder without experts, with
experts in place of every second MLP. These follow nomic-embed-text-v2-moe's paper (arXiv
2502.07972) and model card: softmax over all, the two largest not renormed, one bias of the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf.gguf_files import write_gguf_file
from support.models.encoder_models import (
    Made,
    make,
    of_one_type,
    of_transformers,
    open_encoder,
    some_texts,
)

from appliance.errors import ApplianceError
from appliance.files import write_json
from appliance.model.encoder.loader import load_encoder
from appliance.model.encoder.native import why_unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

COUNT, CHOSEN, INNER, HIDDEN = 6, 2, 96, 64
# The names are those of the published config.json.
SETTINGS: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "max_trained_positions": 210,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": CHOSEN,
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_inner": INNER,
    "n_layer": 4,
    "num_experts": COUNT,
    "num_shared_experts": 0,
    "pad_vocab_size_multiple": 64,
    "qkv_proj_bias": True,
    "rotary_emb_base": 500.0,
    "rotary_emb_fraction": 1.0,
    "type_vocab_size": 1,
    "vocab_size": 97,
}


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.randn(COUNT, HIDDEN) * 0.5
        self.up = torch.randn(COUNT, INNER, HIDDEN) * 0.2
        self.down = torch.randn(COUNT, HIDDEN, INNER) * 0.2
        self.bias = torch.randn(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        shares = (x @ self.router.T).softmax(-1)
        least = shares.sort(-1, descending=True).values[..., CHOSEN - 1 : CHOSEN]
        shares = shares * (shares >= least)
        inner = torch.nn.functional.gelu(torch.einsum("...h,eih->...ei", x, self.up))
        return torch.einsum("...ei,ehi,...e->...h", inner, self.down, shares) + self.bias


def make_experts(path: Path) -> tuple[Made, dict[str, Tensor], dict[int, Experts]]:
    """Write the folder; return its oracle, its tensors without experts, and the experts."""
    made = make("jina-v3", path, ranks=False)
    weights = {
        name.replace("mixer.", "attn."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if not name.startswith(("pooler", "encoder.layers.1.mlp", "encoder.layers.3.mlp"))
    }
    torch.manual_seed(4)
    experts = {1: Experts(), 3: Experts()}
    stored = dict(weights)
    for index, own in experts.items():
        made.oracle.layers[index].mlp = own
        prefix = f"encoder.layers.{index}.mlp."
        stored |= {
            f"{prefix}router.layer.weight": own.router,
            f"{prefix}experts.mlp.w1": own.up.reshape(-1, HIDDEN),
            f"{prefix}experts.mlp.w2": own.down.mT.reshape(-1, HIDDEN).contiguous(),
            f"{prefix}experts.bias": own.bias,
        }
    save_file(stored, path / "model.safetensors")
    write_json(path / "config.json", SETTINGS)
    return made, weights, experts


def assert_states_are_those_of(made: Made, path: Path) -> None:
    source = open_encoder(path)
    assert why_unsupported(source.spec) == "its layers have experts"
    encoder = load_encoder(source, torch.float32, torch.device("cpu"), lambda *_: None)
    texts = some_texts(made.longest)
    together = of_one_type(texts)
    states = torch.from_numpy(encoder.hidden(together)).split(together.lengths)
    for own, ids in zip(states, texts, strict=True):
        torch.testing.assert_close(own, of_transformers(made.oracle, ids), rtol=1e-4, atol=2e-5)


def test_a_folder_has_the_states_of_its_description(tmp_path: Path) -> None:
    made, _, _ = make_experts(tmp_path)
    assert_states_are_those_of(made, tmp_path)


GGUF_NAMES = {
    "embeddings.word_embeddings.": "token_embd.",
    "embeddings.token_type_embeddings.": "token_types.",
    "emb_ln.": "token_embd_norm.",
    "encoder.layers.": "blk.",
    "attn.Wqkv.": "attn_qkv.",
    "attn.out_proj.": "attn_output.",
    "norm1.": "attn_output_norm.",
    "norm2.": "layer_output_norm.",
    "mlp.fc1.": "ffn_up.",
    "mlp.fc2.": "ffn_down.",
}


def test_a_file_has_the_states_of_its_description_without_the_bias(tmp_path: Path) -> None:
    """llama.cpp's conversion/bert.py writes it like this, without the experts' bias."""
    made, weights, experts = make_experts(tmp_path)
    tensors = {}
    for name, tensor in weights.items():
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for index, own in experts.items():
        own.bias.zero_()
        tensors[f"blk.{index}.ffn_gate_inp.weight"] = own.router
        tensors[f"blk.{index}.ffn_up_exps.weight"] = own.up
        tensors[f"blk.{index}.ffn_down_exps.weight"] = own.down
    settings = {
        "block_count": 4,
        "context_length": 210,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 4,
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 500.0,
        "expert_count": COUNT,
        "expert_used_count": CHOSEN,
        "moe_every_n_layers": 2,
        "pooling_type": 1,
    }
    file = write_gguf_file(tmp_path / "m.gguf", "nomic-bert-moe", settings, tensors)
    assert_states_are_those_of(made, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ({"expert_choice_router": True}, "expert_choice_router"),
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"moe_top_k": COUNT + 1}, "moe_top_k"),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers"),
        ({"num_experts": 8}, "experts.mlp.w1 has shape|router.layer.weight has shape"),
    ],
)
def test_another_router_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_experts(tmp_path)
    write_json(tmp_path / "config.json", SETTINGS | change)
    with pytest.raises(ApplianceError, match=words):
        open_encoder(tmp_path)
