"""Gives a file of Ollama's own converter the names and settings that llama.cpp's would have.

Ollama names some settings and tensors otherwise, leaves out what its executor assumes, and keeps
vision and audio in the same file. Sources: convert/*.go and model/models/*/model_text.go of
ollama/ollama. Changes only what llama.cpp's converter never writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf.header import GGUFHeader, TensorInfo

_ARCHITECTURES = {"gptoss": "gpt-oss", "qwen25vl": "qwen2vl"}
# Settings without the prefix of the architecture: Ollama's name and llama.cpp's.
_SETTINGS = {
    "attention.head_dim": "attention.key_length",
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.mrope_section": "rope.dimension_sections",
    "mrope_sections": "rope.dimension_sections",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling_beta": "attention.temperature_scale",
}
# Parts of tensors' names by llama.cpp's architecture.
_TENSORS = {
    "gpt-oss": {
        ".attn_out.": ".attn_output.",
        ".attn_sinks": ".attn_sinks.weight",
        ".ffn_norm.": ".post_attention_norm.",
    },
    "lfm2": {"output_norm.weight": "token_embd_norm.weight"},
}
# Its first files of EmbeddingGemma are labelled as Gemma 3. What is done with them is what Ollama's
# llama/compat does before llama.cpp reads them.
_FIRST_DENSE = "dense.0.weight"
_EMBEDDINGGEMMA = {
    _FIRST_DENSE: "dense_2.weight",
    "dense.1.weight": "dense_3.weight",
    "norm.weight": "output_norm.weight",
}
_GEMMA3_LAYERS_OF_1B = 26
_GEMMA3_LONG_CONTEXT = 131072  # of the sizes whose global layers were stretched eightfold


def as_llama_cpp(header: GGUFHeader) -> GGUFHeader:
    """Return a header under llama.cpp's names; the same one if it has no name of Ollama's.

    Raises:
        UnsupportedModelError: tensors are in an order of Ollama's own.
    """
    stored = str(header.metadata.get("general.architecture"))
    architecture = _ARCHITECTURES.get(stored, stored)
    if stored == "gemma3" and _FIRST_DENSE in header.tensors:
        architecture = "gemma-embedding"
    metadata = _metadata(header.metadata, stored, architecture)
    if architecture == "gemma3" and _is_gemma3(header.metadata):
        _add_gemma3(metadata)
    if architecture == "gemma-embedding" and stored != architecture:
        _add_embeddinggemma(metadata, header.tensors)
    if architecture == "gpt-oss" and stored != architecture:
        metadata.setdefault("gpt-oss.rope.scaling.type", "yarn")
    if architecture == "gemma4" and metadata.get("tokenizer.ggml.model") == "llama":
        metadata["tokenizer.ggml.model"] = "gemma4"  # its pieces are merged, not scored
    if stored == "gptoss":
        _refuse_rows_in_turn(header)
    tensors = _tensors(header.tensors, architecture)
    if metadata == header.metadata and list(tensors) == list(header.tensors):
        return header
    return replace(header, metadata=metadata, tensors=tensors)


def _metadata(stored: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Rename settings; those that llama.cpp's name gives already win."""
    found: dict[str, Any] = {}
    scale, of_all = (
        stored.get(f"{old}.rope.scaling.{key}") for key in ("mscale", "mscale_all_dim")
    )
    for key, value in stored.items():
        prefix, _, setting = key.partition(".")
        if key == "general.architecture":
            found[key] = new if prefix == "general" and value == old else value
        elif prefix != old:
            found[key] = value
        elif setting == "rope.scaling.mscale" and scale == of_all:
            continue  # their ratio counts
        elif (name := _SETTINGS.get(setting, setting)) == setting or f"{old}.{name}" not in stored:
            found[f"{new}.{name}"] = value
    return found


def _tensors(stored: Mapping[str, TensorInfo], architecture: str) -> dict[str, TensorInfo]:
    found = {}
    for name, info in stored.items():
        if architecture == "gemma-embedding":
            name = _EMBEDDINGGEMMA.get(name, name)
        for old, new in _TENSORS.get(architecture, {}).items():
            renamed = name.replace(old, new)
            # The parts of other names, such as `attn_sinks.weight`, are llama.cpp's.
            if renamed != name and new not in name and renamed not in stored:
                name = renamed
        found[name] = info if name == info.name else replace(info, name=name)
    return found


def _refuse_rows_in_turn(header: GGUFHeader) -> None:
    """Refuse gpt-oss's experts as Ollama's first converter had them."""
    name = next((name for name in header.tensors if ".ffn_gate_up_exps." in name), None)
    if name is not None:
        raise UnsupportedModelError(
            f"{header.files[0].path}: tensor {name} has rows of gate and up in turn, as only "
            "Ollama's first files of gpt-oss; use a file of llama.cpp's converter"
        )


def _is_gemma3(metadata: Mapping[str, Any]) -> bool:
    """Return True for a file that lacks a setting which llama.cpp's converter always writes."""
    keys = ("mm.tokens_per_image", "vision.block_count", "rope.local.freq_base")
    is_marked = any(f"gemma3.{key}" in metadata for key in keys)
    return is_marked or "gemma3.attention.layer_norm_rms_epsilon" not in metadata


def _add_embeddinggemma(metadata: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    prefix = "gemma-embedding."
    for key in ("attention.causal", "attention.sliding_window_pattern"):
        metadata.pop(prefix + key, None)
    metadata.setdefault(prefix + "attention.layer_norm_rms_epsilon", 1e-6)
    metadata.setdefault(prefix + "rope.freq_base_swa", 10000.0)
    metadata.setdefault(prefix + "pooling_type", 1)
    for old, new in _EMBEDDINGGEMMA.items():
        if new.startswith("dense_") and old in tensors:
            rows, columns = tensors[old].shape
            name = prefix + new.removesuffix(".weight")
            metadata[f"{name}_feat_in"], metadata[f"{name}_feat_out"] = columns, rows


def _add_gemma3(metadata: dict[str, Any]) -> None:
    """Add what Ollama's executor assumes of a Gemma 3, as its makers' config.json has it."""
    metadata.setdefault("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    if metadata.get("gemma3.block_count") == _GEMMA3_LAYERS_OF_1B:
        metadata.pop("gemma3.final_logit_softcapping", None)  # 30 by mistake in early files
    is_scaled = any(key.startswith("gemma3.rope.scaling.") for key in metadata)
    context = metadata.get("gemma3.context_length")
    if not is_scaled and isinstance(context, int) and context >= _GEMMA3_LONG_CONTEXT:
        metadata["gemma3.rope.scaling.type"] = "linear"
        metadata["gemma3.rope.scaling.factor"] = 8.0
