"""GGUF files of small encoders, as llama.cpp's converter writes them, under gguf's own names.

Settings and transforms are those of conversion/bert.py and conversion/gemma.py: no padding rows in
the positions, no pooler, 1 added to Gemma's norms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
from safetensors.torch import load_file
from support.gguf.gguf_files import known_name, write_gguf_file

from appliance.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
_LABELS = {
    "bert": "bert",
    "xlm-roberta": "bert",
    "nomic_bert": "nomic-bert",
    "jina_embeddings_v3": "jina-bert-v3",
    "modernbert": "modern-bert",
    "gemma3_text": "gemma-embedding",
    "eurobert": "eurobert",
    "qwen2": "qwen2",
}
_PREFIXES = ("bert.", "roberta.", "model.")
_UNUSED = ("pooler.", "embeddings.position_ids")


def write_encoder_gguf(
    folder: Path,
    pooling: int | None = MEAN,
    packed: Callable[[str, Any], Any] = lambda name, data: None,
    **changes: Any,
) -> Path:
    """Write a folder's model to `m.gguf` in it; `changes` replace settings."""
    config = read_json(folder / "config.json")
    kind, label = config["model_type"], _LABELS[config["model_type"]]
    settings: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.causal": False,
    }
    ropes = config.get("rope_parameters") or {}
    for key, rope in {
        "rope.freq_base": ropes.get("full_attention", ropes),
        "rope.freq_base_swa": ropes.get("sliding_attention", {}),
    }.items():
        settings |= {key: float(rope["rope_theta"])} if "rope_theta" in rope else {}
    for name, key in _OTHERS.items():
        if (value := config.get(name)) is not None:
            settings[key] = value
    if kind == "modernbert":
        settings["attention.layer_norm_epsilon"] = config["norm_eps"]
        settings["hidden_activation"] = config["hidden_activation"]
    if kind == "xlm-roberta":
        settings["context_length"] -= config["pad_token_id"] + 1
    if pooling is not None:
        settings["pooling_type"] = pooling
    settings = {key: value for key, value in (settings | changes).items() if value is not None}
    weights = load_file(folder / "model.safetensors")
    tensors = dict(
        named
        for name, tensor in weights.items()
        if (named := _tensor(name, tensor, kind, label, config)) is not None
    )
    return write_gguf_file(folder / "m.gguf", label, settings, tensors, packed)


_OTHERS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "local_attention": "attention.sliding_window",
    "sliding_window": "attention.sliding_window",
}


def _tensor(
    name: str, tensor: Tensor, kind: str, label: str, config: dict[str, Any]
) -> tuple[str, Tensor] | None:
    own = name
    for prefix in _PREFIXES:
        own = own.removeprefix(prefix)
    if own.startswith(_UNUSED):
        return None
    if own == "embeddings.position_embeddings.weight" and kind == "xlm-roberta":
        tensor = tensor[config["pad_token_id"] + 1 :]
    if own.startswith("classifier.") and "dense" not in own and "out_proj" not in own:
        own = own.replace("classifier.", "classifier.out_proj.")
    if kind == "gemma3_text" and own.endswith("norm.weight"):
        tensor = tensor + 1
    try:
        return known_name(own, label, config["num_hidden_layers"]), tensor
    except AssertionError:
        return known_name(f"model.{own}", label, config["num_hidden_layers"]), tensor


def q8_0(name: str, data: Any) -> gguf.GGMLQuantizationType | None:
    """Matrices in 8 bits, as `--outtype q8_0` stores them."""
    wide = data.ndim == 2 and not data.shape[1] % 32 and name != "token_types.weight"
    return gguf.GGMLQuantizationType.Q8_0 if wide else None
