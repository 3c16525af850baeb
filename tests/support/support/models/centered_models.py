"""Small models whose norms subtract the mean: before the parts of a layer, beside or after them."""

from __future__ import annotations

from typing import Any

OPT = {"ffn_dim": 76}
FALCON = {"ffn_hidden_size": 76}
CENTERED: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", OPT),
    # Like OPT 350M: norms after each addition, embeddings of another width.
    "opt-after": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    # Like Falcon 7B: one key head, one norm for attention and MLP.
    "falcon": ("falcon", FALCON),
    # Like Falcon 40B: a few key heads and a norm each.
    "falcon-new": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    # Like Falcon 2.
    "falcon-2": (
        "falcon",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    # One norm for attention and MLP, and a bias of the head.
    "phi": ("phi", {}),
    "gpt_neox": ("gpt_neox", {}),
    "nemotron": ("nemotron", {}),
    "gpt_neox-in-turn": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon-in-turn": ("falcon", FALCON | {"parallel_attn": False, "multi_query": False}),
}
